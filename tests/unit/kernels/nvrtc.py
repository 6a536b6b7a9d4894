"""NVRTC through its C interface: compiles CUDA for an architecture on a machine that has no GPU."""

import ctypes
import functools
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from common.kernels.cuda_sources import OPTIONS, read_source


@dataclass(frozen=True)
class KernelUse:
    """What ptxas says a kernel takes: registers a thread, bytes of stack, of spill stores and of spill loads."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


@functools.cache
def _library() -> ctypes.CDLL:
    """Raises RuntimeError when the nvidia-cuda-nvrtc wheel is not installed (an extra of `dev`)."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(path for folder in folders for path in folder.glob("**/lib/libnvrtc.so.*"))
    if not found:
        raise RuntimeError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    # NVRTC opens its builtins by name alone, which finds what is loaded already.
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(found[0]))
    loaded.nvrtcGetErrorString.restype = ctypes.c_char_p
    return loaded


def version() -> tuple[int, int]:
    major, minor = ctypes.c_int(), ctypes.c_int()
    _checked(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return major.value, minor.value


def _checked(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call}: {_library().nvrtcGetErrorString(code).decode()}")


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(getattr(_library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)), what)
    buffer = ctypes.create_string_buffer(size.value)
    _checked(getattr(_library(), f"nvrtcGet{what}")(program, buffer), what)
    return buffer.raw


def compile_text(source: str, name: str, architecture: str) -> tuple[bytes, str]:
    """The machine code and the compiler's log. Raises RuntimeError with the log when it doesn't compile."""
    program = ctypes.c_void_p()
    library = _library()
    _checked(
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None),
        "nvrtcCreateProgram",
    )
    try:
        options = [*OPTIONS, f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        code = library.nvrtcCompileProgram(program, len(options), array)
        log = _text(program, "ProgramLog").decode(errors="replace").rstrip("\0")
        if code:
            raise RuntimeError(f"{name}.cu for {architecture}: {library.nvrtcGetErrorString(code).decode()}\n{log}")
        return _text(program, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def compile_source(name: str, architecture: str) -> tuple[bytes, dict[str, KernelUse]]:
    """The machine code of <name>.cu, for example for "sm_90", and what each of its kernels takes."""
    code, log = compile_text(read_source(name), name, architecture)
    pattern = (
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers"
    )
    uses = {
        kernel: KernelUse(int(registers), int(stack), int(stores), int(loads))
        for kernel, stack, stores, loads, registers in re.findall(pattern, log, re.DOTALL)
    }
    return code, uses
