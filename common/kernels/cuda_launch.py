"""Launching a CUDA kernel: what the backend needs of a runtime, and CuPy as that runtime."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.kernels.cuda_sources import OPTIONS, read_source


class Launcher(Protocol):
    """Runs kernels on one device, in the order of launches on torch's current stream."""

    device: torch.device
    multiprocessors: int
    # Bytes of shared memory a block may ask for.
    shared_limit: int

    def launch(
        self, source: str, kernel: str, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> None:
        """`arguments` are addresses and integers; every kernel parameter is 64 bits wide."""
        ...

    def reaches(self, tensor: Tensor) -> bool:
        """Whether kernels can read and write this tensor at its data_ptr()."""
        ...


class CupyLauncher:
    """CuPy's RawModule. NVRTC compiles a source at its first use; CuPy keeps the result on disk
    (CUPY_CACHE_DIR), keyed by text, options and architecture."""

    def __init__(self, device: torch.device) -> None:
        """Raises ValueError when `device` is no CUDA device, ImportError without cupy."""
        if device.type != "cuda":
            raise ValueError(f"the cuda kernels need a CUDA device, got {device}")
        # torch leaves the index out (None) where the current device is meant, which its types don't say.
        self.device = torch.empty(0, device=device).device
        self._cupy: Any = importlib.import_module("cupy")
        properties: Any = torch.cuda.get_device_properties(self.device)
        self.multiprocessors = int(properties.multi_processor_count)
        with self._cupy.cuda.Device(self.device.index):
            self.shared_limit = int(self._cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"])

    def launch(
        self, source: str, kernel: str, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> None:
        """See Launcher.launch."""
        with self._cupy.cuda.Device(self.device.index):
            function = self._function(source, kernel)
            if shared_bytes > 48 * 1024 and function.max_dynamic_shared_size_bytes < shared_bytes:
                function.max_dynamic_shared_size_bytes = shared_bytes
            stream = self._stream(torch.cuda.current_stream(self.device).cuda_stream)
            with stream:
                function(grid, (threads,), tuple(np.int64(value) for value in arguments), shared_mem=shared_bytes)

    def reaches(self, tensor: Tensor) -> bool:
        """On this device, or page-locked on the host (one address space)."""
        return tensor.device == self.device or (tensor.device.type == "cpu" and tensor.is_pinned())

    @functools.cache  # noqa: B019 (one launcher a process, few streams)
    def _stream(self, pointer: int) -> Any:
        """torch's stream for CuPy. CuPy prefers streams by protocol, which not every torch has."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return self._cupy.cuda.ExternalStream(pointer)

    @functools.cache  # noqa: B019 (one launcher a process)
    def _function(self, source: str, kernel: str) -> Any:
        module = self._cupy.RawModule(code=read_source(source), options=OPTIONS, backend="nvrtc")
        return module.get_function(kernel)
