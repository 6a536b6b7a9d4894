"""The staging pool: rows go to the host pages they belong to, staging pages are the prompt's alone."""

import pytest
import torch

from common.kernels.cpu import cpu_kernels
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from decode_service.device_pools import DevicePools
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.page_allocator import PageAllocator
from decode_service.resources import ResourcePools
from decode_service.staging import StagingPool

CONFIG = ModelConfig.from_dict(small_config())
LAYERS = CONFIG.layers_of(4)


def test_rows_are_copied_to_their_host_pages_and_no_other_byte_changes():
    host = DeepSeekV4PagedHostPool(LAYERS, 6, cpu_kernels())
    staging = StagingPool(LAYERS, 4, cpu_kernels())
    for buffer in staging.buffers.values():
        buffer.random_(0, 256)
    staging.copy_to_host(host, (3, 1), (4, 0), 64 + 2)
    for layer, buffer in staging.buffers.items():
        copied = host.buffers[layer]
        assert torch.equal(copied[4, : 64 * 584], buffer[3, : 64 * 584])
        assert torch.equal(copied[0, : 2 * 576], buffer[1, : 2 * 576])
        assert not copied[0, 2 * 576 : 64 * 576].any()
        assert not copied[[1, 2, 3, 5]].any()


def test_more_rows_than_pages_hold_are_refused():
    host = DeepSeekV4PagedHostPool(LAYERS, 6, cpu_kernels())
    with pytest.raises(ValueError, match="65 entries do not fit 1 staging and 2 host pages"):
        StagingPool(LAYERS, 4, cpu_kernels()).copy_to_host(host, (3,), (4, 0), 65)


def test_staging_pages_are_reserved_for_the_prompt_alone_and_come_back_before_the_rest():
    host, device = DeepSeekV4PagedHostPool(LAYERS, 8, cpu_kernels()), DevicePools.of(CONFIG, 8, 4)
    staging = StagingPool(LAYERS, 3, cpu_kernels())
    pools = ResourcePools(host, device, PageAllocator("hot", 4), staging)
    assert pools.fits_ever(2000, 700)
    assert not pools.fits_ever(2000, 1000)
    held = pools.reserve(1500, 500)
    assert held is not None
    assert (len(held.host_pages), len(held.staging_pages)) == (6, 2)
    assert pools.reserve(500, 500) is None, "one staging page is left"
    pools.check_integrity([held])
    admitted = pools.release_staging(held)
    assert admitted.staging_pages == ()
    pools.check_integrity([admitted])
    assert staging.allocator.free == 3
    pools.release(admitted)
    pools.check_integrity([])
