"""Where a service computes: the device, its KV kernels, and host memory that the device can reach."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from common.kernels.cpu import cpu_kernels
from common.kernels.cuda_backend import cuda_kernels
from common.kernels.interface import KVKernels


@dataclass(frozen=True)
class Backend:
    device: torch.device
    kernels: KVKernels

    @property
    def on_host(self) -> bool:
        """Whether the device's memory is the host's."""
        return self.device.type == "cpu"

    def host_bytes(self, *shape: int) -> Tensor:
        """Zeroed uint8 host memory that the kernels reach: page-locked for a GPU. Raises RuntimeError where the
        system has or grants no such memory."""
        if self.on_host:
            return torch.zeros(*shape, dtype=torch.uint8)
        return torch.zeros(*shape, dtype=torch.uint8, pin_memory=True)

    def finish(self) -> None:
        """Waits until everything that this thread launched is done."""
        if not self.on_host:
            torch.cuda.current_stream(self.device).synchronize()


def open_backend(name: str) -> Backend:
    """`name`: cpu, cuda or cuda:N. Raises ValueError that says what is missing."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device = {name!r} is none of cpu, cuda, cuda:N") from None
    if device.type == "cpu":
        return Backend(torch.device("cpu"), cpu_kernels())
    if device.type != "cuda":
        raise ValueError(f"device = {name!r} is none of cpu, cuda, cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(f"device = {name!r}, but this process sees {count} CUDA devices")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    try:
        kernels = cuda_kernels(device)
    except ImportError as error:
        raise ValueError(f"device = {name!r} needs cupy ({error}); install the extra cuda12 or cuda13") from None
    return Backend(device, kernels)
