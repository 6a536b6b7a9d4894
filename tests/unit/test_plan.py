"""What `dsv4-pd plan` says is what the services allocate."""

import json

import pytest
from typer.testing import CliRunner

from common.cli.main import app
from common.kernels.cpu import cpu_kernels
from common.kv.footprint import Footprint
from common.model.config import ModelConfig
from common.model.plan import plan_model, rank_bytes
from common.model.public_configs import FLASH, PRO
from common.model.small_checkpoint import small_config
from common.quantities import parse_bytes, parse_tokens, show_bytes, show_tokens
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool


@pytest.mark.parametrize("hot_entries", [64, 100, 256])
def test_footprints_are_the_bytes_of_the_pools(hot_entries: int):
    config = ModelConfig.from_dict(small_config())
    host = DeepSeekV4PagedHostPool(config.layers_of(4), 3, cpu_kernels())
    device = DevicePools.of(config, 3, 2)
    hot = HiSparseCoordinator(host, cpu_kernels(), 2, hot_entries)
    found = Footprint.of(config.compress_ratios, hot_entries)
    assert found.host_page == host.page_bytes == sum(b[0].nbytes for b in host.buffers.values())
    assert found.logical_page == sum(b[0].nbytes for b in (*device.index.values(), *device.c128.values()))
    assert found.window_slot == sum(b[0].nbytes for b in device.window.values())
    assert found.state_slot == sum(b[0].nbytes for b in device.states.values())
    assert found.hot_slot == hot.slot_bytes
    assert found.slots == found.window_slot + found.state_slot + found.hot_slot + found.hot_table


def test_a_million_tokens_of_flash():
    """153 MB a C4 layer on the host (the public arithmetic), 21 such layers; 33 B of index keys a token and layer."""
    config = ModelConfig.from_dict(FLASH)
    found = Footprint.of(config.compress_ratios, 4 * config.index_topk)
    assert found.host_bytes(1 << 20) == 21 * 4096 * 37440
    assert found.logical_page == 21 * 8448 + 20 * 1728
    assert found.resident_bytes(1 << 20) > 3 * found.device_bytes(1 << 20)
    assert found.most_requests(1 << 20, 10 * found.host_bytes(1 << 20), 1 << 50) == 10
    assert found.most_requests(1 << 20, 1 << 60, found.shared + 3 * found.device_bytes(1 << 20) - 1) == 2
    assert found.most_requests(3, 0, found.shared + 2 * found.device_bytes(3)) == 2


@pytest.mark.parametrize("public", [FLASH, PRO])
def test_ranks_share_what_can_be_divided(public: dict[str, object]):
    config = ModelConfig.from_dict(public)
    whole = plan_model(config).weight_bytes
    found = {ranks: rank_bytes(config, ranks) for ranks in (1, 2, 3, 4, 8, 16)}
    assert found[1] == whole
    for ranks, size in found.items():
        assert size * ranks >= whole
        # What every rank holds is little beside the experts.
        assert size < whole / ranks * 1.35 + (1 << 30)
    with pytest.raises(ValueError, match="0 ranks"):
        rank_bytes(config, 0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1TB", 10**12), ("8GiB", 8 << 30), ("512 gb", 512 * 10**9), ("1.5k", 1500), ("4096", 4096), ("7b", 7)],
)
def test_bytes_as_people_write_them(text: str, value: int):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "8 apples", "-1GB", "1e9", "8G iB"])
def test_what_is_no_number_of_bytes_is_refused(text: str):
    with pytest.raises(ValueError, match="is no number of bytes"):
        parse_bytes(text)


def test_tokens_and_back():
    assert parse_tokens("1m") == 1 << 20
    assert parse_tokens("256K") == 256 << 10
    assert [show_tokens(n) for n in (1 << 20, 131072, 1000)] == ["1m", "128k", "1000"]
    assert [show_bytes(n) for n in (12, 1536, 3 << 30, 5 << 40)] == ["12 B", "1.5 KiB", "3.0 GiB", "5.00 TiB"]


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    return done.exit_code, done.output


def test_the_command_prints_what_fits():
    status, output = run("--model", "flash", "--context", "1m", "--host-mem", "1TB", "--gpu", "h200", "--json")
    assert status == 0
    plan = json.loads(output)
    last = plan["fits"][-1]
    assert last["tokens"] == 1 << 20
    assert last["hisparse"] == min(
        plan["host_budget"] // last["host_bytes"],
        (plan["device_budget"] - plan["footprint"]["shared"]) // last["device_bytes"],
    )
    assert last["hisparse"] >= 3 * last["resident"] > 0
    status, output = run("--model", "pro", "--context", "256k")
    assert status == 0
    assert "256k" in output
    assert "without HiSparse" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "fish"], "'fish' is neither flash, pro nor"),
        (["--context", "2m"], "the model has 1048576 positions"),
        (["--context", "many"], "'many' is no number of tokens"),
        (["--host-mem", "1 QB"], "'1 QB' is no number of bytes"),
        (["--gpu", "tpu"], "'tpu' is no number of bytes"),
        (["--ranks", "1", "--gpu", "h100"], "don't fit 80.0 GiB"),
        (["--hot-entries", "5"], "hot_entries = 5 is less than the model's index_topk = 512"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: list[str], message: str):
    status, output = run(*arguments)
    assert status == 2
    assert message in " ".join(output.split())
