"""Runs the CUDA kernels on the CPU, compiled by g++ with cuda_emulation.h in the place of CUDA."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from common.kernels.cuda_sources import read_source

HEADER = Path(__file__).parent / "cuda_emulation.h"
MOST_ARGUMENTS = 24
FAILURES = {1: "threads wait for one another for ever", 2: "shared memory was written beyond its end"}


def edited_source(name: str, edit: tuple[str, str] | None) -> str:
    """The source, with `edit` = (text, replacement) made in it: a test that must notice breaks the kernel so."""
    source = read_source(name)
    if edit is not None:
        if source.count(edit[0]) != 1:
            raise ValueError(f"{edit[0]!r} is {source.count(edit[0])} times in {name}.cu")
        source = source.replace(*edit)
    return source


@functools.cache
def library(name: str, edit: tuple[str, str] | None = None) -> ctypes.CDLL:
    """Compiles a source; raises RuntimeError with the compiler's words where it can't."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise RuntimeError("g++ is needed to run the CUDA kernels on the CPU")
    folder = Path(tempfile.mkdtemp(prefix="dsv4pd-emulated-"))
    try:
        (folder / "kernel.cpp").write_text(f'#include "{HEADER}"\n' + edited_source(name, edit))
        flags = [
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-fvisibility=hidden",
            "-shared",
            "-fPIC",
        ]
        command = [compiler, *flags, "-w", str(folder / "kernel.cpp"), "-o", str(folder / "kernel.so")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}.cu does not compile for the CPU:\n{done.stderr}")
        loaded = ctypes.CDLL(str(folder / "kernel.so"))
    finally:
        shutil.rmtree(folder)
    loaded.emulate.argtypes = [
        ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64,
    ]  # fmt: skip
    return loaded


class EmulatedLauncher:
    """A Launcher whose device is the CPU. Threads run in an order that every launch draws anew."""

    def __init__(self, seed: int = 1, edit: tuple[str, str] | None = None, edited: str = "") -> None:
        """`edit` is made in the source `edited`."""
        self.device = torch.device("cpu")
        self.multiprocessors = 2
        self.shared_limit = 227 * 1024
        self.launches: list[str] = []
        self._seed = seed
        self._edit, self._edited = edit, edited

    def launch(
        self, source: str, kernel: str, grid: tuple[int, int], threads: int, shared_bytes: int, arguments: Sequence[int]
    ) -> None:
        loaded = library(source, self._edit if source == self._edited else None)
        padded = [*arguments, *[0] * (MOST_ARGUMENTS - len(arguments))]
        values = (ctypes.c_uint64 * MOST_ARGUMENTS)(*[value & (2**64 - 1) for value in padded])
        self._seed += 1
        address = ctypes.cast(getattr(loaded, kernel), ctypes.c_void_p)
        failed = loaded.emulate(address, *grid, threads, shared_bytes, ctypes.addressof(values), self._seed)
        if failed:
            raise RuntimeError(f"{kernel}: {FAILURES[failed]}")
        self.launches.append(kernel)

    def reaches(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device
