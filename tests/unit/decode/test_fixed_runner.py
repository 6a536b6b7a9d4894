"""Decoding in fixed shapes, as it is captured on a GPU, gives what op-by-op decoding gives."""

import pytest
import torch
from torch import Tensor

from common.kernels.attention import TorchDecodeAttention, top_entries_fixed
from common.kernels.cpu import cpu_kernels
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model
from common.model.selection import top_entries
from common.model.small_checkpoint import random_weights, small_config
from decode_service.decode_runner import DecodeRunner, EagerRunner, FixedRunner
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import RequestResources, ResourcePools
from tests.support.in_process import hand_over

CONFIG = ModelConfig.from_dict(small_config(index_topk=16))
PAGES = 12


@pytest.fixture(scope="module")
def model() -> DeepSeekV4Model:
    return DeepSeekV4Model(CONFIG, random_weights(CONFIG, 5))


class Side:
    """Pools of their own, shuffled by `seed`, with the prompts landed and admitted."""

    def __init__(
        self, model: DeepSeekV4Model, prompts: list[list[int]], steps: int, hot: int, seed: int, resident: int
    ) -> None:
        kernels = cpu_kernels()
        self.host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), 40, kernels, seed)
        self.device = DevicePools.of(CONFIG, 40, 8, seed)
        self.hisparse = HiSparseCoordinator(self.host, kernels, 8, hot, seed, resident_pages=resident)
        pools = ResourcePools(self.host, self.device, self.hisparse.slots)
        self.resources: list[RequestResources] = []
        self.tokens: list[int] = []
        for prompt in prompts:
            resources = pools.reserve(len(prompt) + steps)
            assert resources is not None
            self.tokens.append(hand_over(model, prompt, self.host, self.device, resources))
            self.hisparse.admit_request_direct(resources, len(prompt))
            self.resources.append(resources)

    def step(self, runner: DecodeRunner, rows: list[int], positions: list[int], tokens: list[int]) -> Tensor:
        resources, at = [self.resources[i] for i in rows], [positions[i] for i in rows]
        self.hisparse.prepare_step(resources, at)
        return runner.step(resources, at, [tokens[i] for i in rows])


@pytest.mark.parametrize(("hot", "resident"), [(16, 0), (21, 0), (512, 0), (16, 3), (64, 4), (16, 40)])
def test_logits_agree_with_op_by_op_decoding(model: DeepSeekV4Model, hot: int, resident: int):
    generator = torch.Generator().manual_seed(hot)
    lengths = [1, 3, 63, 66, 127, 130, 258, 509]
    prompts = [torch.randint(4, 260, (n,), generator=generator).tolist() for n in lengths]
    steps = 14
    eager, fixed = (Side(model, prompts, steps, hot, seed, resident) for seed in (1, 2))
    kernels = cpu_kernels()
    left = EagerRunner(model, kernels, eager.device, eager.hisparse)
    right = FixedRunner(model, kernels, TorchDecodeAttention(kernels), fixed.device, fixed.hisparse, PAGES)
    assert eager.tokens == fixed.tokens
    tokens = eager.tokens
    for step in range(steps):
        positions = [n + step for n in lengths]
        # A batch whose members change, in another order on either side.
        kept = [i for i in range(len(lengths)) if (i + step) % 5 or step < 4]
        expected = eager.step(left, kept, positions, tokens)
        found = fixed.step(right, kept[::-1], positions, tokens).flip(0)
        assert torch.allclose(found, expected, atol=5e-3, rtol=0), (step, (found - expected).abs().max())
        for i, row in zip(kept, expected, strict=True):
            tokens[i] = int(row.argmax())
        lengths = [n if i in kept else n - 1 for i, n in enumerate(lengths)]
    if resident in (0, 40):
        # In between, who is asked first has more resident pages.
        assert fixed.hisparse.counters == eager.hisparse.counters
    assert (fixed.hisparse.counters.misses > 0) == (hot < 512)
    assert (fixed.hisparse.counters.resident > 0) == (resident > 0)
    running = [r.hot_slot for r in fixed.resources]
    fixed.hisparse.check_integrity(running, [(n + steps) // 4 for n in lengths])


def test_selection_in_fixed_shapes_keeps_the_tie_rule():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(-2, 3, (6, 300), generator=generator).float() * 0.5
    scores[2] = torch.randn(300, generator=generator)
    scores[3] = -0.0
    counts = torch.tensor([300, 40, 299, 64, 5, 0])
    masked = scores.masked_fill(torch.arange(300) >= counts[:, None], -torch.inf)
    found = top_entries_fixed(masked, counts, 40)
    for row, count in enumerate(counts.tolist()):
        if count > 40:
            assert torch.equal(found[row], top_entries(masked[row : row + 1], 40)[0])
        else:
            assert found[row].tolist() == [*range(count), *[-1] * (40 - count)]
    assert top_entries_fixed(masked[:, :10], counts.clamp(max=10), 16)[0].tolist() == [*range(10), *[-1] * 6]
