"""Every CUDA source compiles for every architecture that is served, without a GPU."""

import pytest

from common.kernels.cuda_sources import KERNELS, read_source
from tests.unit.kernels.nvrtc import compile_source, compile_text

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
BLOCKS_OF_1024 = ("swap_in_fused", "swap_in_resolve")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_source_compiles_to_its_kernels_without_spilling(name: str, architecture: str):
    code, uses = compile_source(name, architecture)
    assert code[:4] == b"\x7fELF"
    assert set(uses) == set(KERNELS[name])
    for kernel, use in uses.items():
        assert (use.stack, use.spill_stores, use.spill_loads) == (0, 0, 0), kernel
        # 64 K registers a multiprocessor: one block of 1024 threads, or at least two of 256.
        assert 0 < use.registers <= (64 if kernel in BLOCKS_OF_1024 else 128), kernel


def test_a_mistake_is_an_error_with_the_compilers_words():
    with pytest.raises(RuntimeError, match=r'pack.cu for sm_90: NVRTC_ERROR_COMPILATION(.|\n)*identifier "nonsense"'):
        compile_text(read_source("pack").replace("places[row]", "nonsense[row]"), "pack", "sm_90")


def test_a_source_holds_the_header_once_and_unknown_ones_are_refused():
    for name in KERNELS:
        assert read_source(name).count("struct Pages {") == 1
        assert "#include" not in read_source(name)
    with pytest.raises(ValueError, match="no CUDA source 'nothing'"):
        read_source("nothing")
