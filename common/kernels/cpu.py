"""The cpu backend."""

from __future__ import annotations

from common.kernels import rows_cpu, swap_in_cpu
from common.kernels.interface import KVKernels


class CpuKernels:
    """Every operation of KVKernels in torch on host memory."""

    pack_rows = staticmethod(rows_cpu.pack_rows)
    unpack_rows = staticmethod(rows_cpu.unpack_rows)
    pack_index_keys = staticmethod(rows_cpu.pack_index_keys)
    unpack_index_pages = staticmethod(rows_cpu.unpack_index_pages)
    transfer_rows = staticmethod(rows_cpu.transfer_rows)
    swap_in = staticmethod(swap_in_cpu.swap_in)

    def check_faults(self) -> None:
        """This backend raises at once."""


def cpu_kernels() -> KVKernels:
    """The cpu backend as the interface."""
    return CpuKernels()
