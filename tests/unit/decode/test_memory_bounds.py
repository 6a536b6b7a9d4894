"""What a request takes is bounded before it begins, stays bounded while it grows, and comes back whole."""

import threading

import pytest
import torch

from common.kernels.attention import TorchDecodeAttention
from common.kernels.cpu import cpu_kernels
from common.kv.footprint import Footprint
from common.kv.layout import WINDOW_PAGE
from common.model.config import ModelConfig
from common.model.model import DeepSeekV4Model
from common.model.small_checkpoint import random_weights, small_config
from common.sampling import SampledToken
from decode_service.decode_runner import EagerRunner, FixedRunner
from decode_service.device_pools import DevicePools
from decode_service.main import max_context
from decode_service.pool_sizing import UNLIMITED, pool_sizes
from decode_service.request import FinishedEvent, ReservedEvent
from decode_service.settings import DecodeSettings
from tests.unit.decode.test_decode_kv import CONFIG, D, Pair
from tests.unit.decode.test_engine import WAIT_S, Rig
from tests.unit.decode.test_fixed_runner import Side
from tests.unit.decode.test_pools import make_pools


@pytest.mark.parametrize(
    ("host", "logical", "fits", "too_long"),
    [
        # A page holds 64 entries: 256 tokens, and 3 more that have no entry yet.
        (2, 9, 2 * 256 + 3, 2 * 256 + 4),
        (9, 2, 2 * 256, 2 * 256 + 1),
    ],
    ids=["the host pool is the smaller", "the device pool is the smaller"],
)
def test_the_smaller_pool_bounds_a_request(host: int, logical: int, fits: int, too_long: int):
    pools, _ = make_pools(pages=host, logical=logical)
    assert pools.fits_ever(fits)
    assert not pools.fits_ever(too_long)
    assert pools.reserve(too_long) is None
    taken = pools.reserve(fits)
    assert taken is not None
    pools.release(taken)
    settings = DecodeSettings.load(["--model", "/m", f"--host-pages={host}", f"--logical-pages={logical}"])
    sizes = pool_sizes(settings, CONFIG, Footprint.of(CONFIG.compress_ratios, D), UNLIMITED)
    assert max_context(settings, CONFIG, sizes) == 2 * 256


def test_a_staged_prompt_is_bounded_by_the_staging_pool_and_its_output_is_not():
    rig = Rig(pages=16, staging_pages=2)
    assert rig.pools.fits_ever(2000, prompt_tokens=515)
    assert not rig.pools.fits_ever(2000, prompt_tokens=516)
    rig.engine.stop(WAIT_S)


def test_window_memory_does_not_grow_with_the_length_of_requests():
    short, long = (DevicePools.of(CONFIG, logical_pages=pages, slots=3) for pages in (4, 400))
    for layer, pages in long.window.items():
        assert pages.shape == short.window[layer].shape == (3, WINDOW_PAGE.page_bytes)
    footprint = Footprint.of(CONFIG.compress_ratios, D)
    assert footprint.device_bytes(1 << 20) - footprint.device_bytes(256) == 4095 * footprint.logical_page


def test_a_long_request_stays_inside_its_hot_slot():
    pair = Pair([600, 30], 60, D, seed=9)
    slots = {resources.hot_slot for resources in pair.resources}
    strangers: dict[int, torch.Tensor] = {}
    for layer in CONFIG.layers_of(4):
        hot = pair.hisparse.hot_state(layer)
        per_slot = hot.pages.view(-1, hot.rows_per_slot // 64, hot.pages.shape[1])
        outside = [slot for slot in range(per_slot.shape[0] - 1) if slot not in slots]
        assert len(outside) == 4
        per_slot[outside] = 171
        strangers[layer] = per_slot[outside].clone()
    for _ in range(50):
        pair.step()
    assert pair.hisparse.counters.misses > 0
    for layer, before in strangers.items():
        hot = pair.hisparse.hot_state(layer)
        per_slot = hot.pages.view(-1, hot.rows_per_slot // 64, hot.pages.shape[1])
        outside = [slot for slot in range(per_slot.shape[0] - 1) if slot not in slots]
        assert torch.equal(per_slot[outside], before)


@pytest.mark.parametrize("lengths", [[4090], [4090, 3]], ids=["alone", "beside a short one"])
def test_a_request_that_grows_past_4096_tokens_reads_its_new_page(lengths: list[int]):
    pair = Pair(lengths, 24, D, seed=12)
    # Entry 1024, the first of page 16, is born on the way and selected.
    for _ in range(22):
        pair.step()
    assert int(pair.batch.positions[0]) // 4 > 1024


def test_fixed_shapes_agree_with_op_by_op_decoding_past_4096_tokens():
    config = ModelConfig.from_dict(small_config(index_topk=16))
    model = DeepSeekV4Model(config, random_weights(config, 5))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 260, (n,), generator=generator).tolist() for n in (4092, 9)]
    kernels, steps = cpu_kernels(), 10
    eager, fixed = (Side(model, prompts, steps, 21, seed, 4) for seed in (1, 2))
    left = EagerRunner(model, kernels, eager.device, eager.hisparse)
    right = FixedRunner(model, kernels, TorchDecodeAttention(kernels), fixed.device, fixed.hisparse, 20)
    assert eager.tokens == fixed.tokens
    tokens = eager.tokens
    for step in range(steps):
        positions = [len(prompt) + step for prompt in prompts]
        expected = eager.step(left, [0, 1], positions, tokens)
        found = fixed.step(right, [0, 1], positions, tokens)
        assert torch.allclose(found, expected, atol=5e-3, rtol=0), step
        tokens = expected.argmax(1).tolist()


@pytest.mark.parametrize("prompt", [1, 3, 8, 255, 256, 257])
def test_a_request_that_stops_early_gives_back_what_was_reserved_not_what_it_used(prompt: int):
    rig = Rig(slots=3)
    neighbour = rig.request(prompt=300)
    rig.engine.submit(neighbour.request)
    rig.engine.submit((client := rig.request(prompt=prompt, max_tokens=1500, stop_token_ids=(12,))).request)
    held, reserved = neighbour.wait(ReservedEvent).resources, client.wait(ReservedEvent).resources
    assert len(reserved.host_pages) == -(-((prompt + 1500) // 4) // 64)
    rig.engine.admit(client.request, SampledToken(10, 0.0))
    assert client.wait(FinishedEvent).reason == "stop"
    rig.sound()
    use = {pool.name: pool for pool in rig.pools.use()}
    assert use["host_c4"].used == len(held.host_pages)
    assert use["logical"].used == len(held.logical_pages)
    assert all(use[name].used == 1 for name in ("window", "state", "hot"))
    # The stream gives back once more; its pages may be somebody else's by then.
    rig.engine.submit((behind := rig.request(prompt=3000)).request)
    behind.wait(ReservedEvent)
    rig.engine.release(client.request).result(WAIT_S)
    rig.sound()
    rig.engine.stop(WAIT_S)


def test_one_token_health_requests_leave_an_idle_engine_sound_while_they_come_and_go():
    rig = Rig(slots=2, max_queued=64)
    stop = threading.Event()
    troubles: list[Exception] = []

    def check() -> None:
        while not stop.is_set():
            try:
                rig.sound()
            except Exception as error:  # noqa: BLE001 - shown below
                troubles.append(error)
                return

    checker = threading.Thread(target=check)
    checker.start()
    for _ in range(5):
        clients = [rig.request(prompt=1, max_tokens=1) for _ in range(20)]
        for client in clients:
            rig.engine.submit(client.request)
        for number, client in enumerate(clients):
            client.wait(ReservedEvent)
            if number % 3:
                rig.engine.admit(client.request, SampledToken(7, 0.0))
                client.wait(FinishedEvent)
            else:
                rig.engine.release(client.request).result(WAIT_S)
        assert rig.idle()
        rig.sound()
    stop.set()
    checker.join(WAIT_S)
    assert not troubles, troubles[0]
    rig.engine.stop(WAIT_S)
