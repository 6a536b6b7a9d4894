"""What tests of several folders share."""

import os
from pathlib import Path

import pytest

# Read when torch is loaded. Threads that spin while they wait take many times as long where a core has other work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Triton decides when it is first imported whether its kernels are compiled or interpreted, and any module may import
# it first (transformers' does): so here, before any test module.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from common.model.checkpoint import load_weights
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model
from common.model.small_checkpoint import write_small_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several services run beside the test: more threads only get in each other's way."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    write_small_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> DeepSeekV4Model:
    config = ModelConfig.from_file(checkpoint)
    return DeepSeekV4Model(config, load_weights(checkpoint, config))
