"""Flags, environment and file, in that order; wrong ones end the service with a line that names them."""

from pathlib import Path

import pytest

from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from router_service.settings import RouterSettings

MODEL = ("--model", "/m")


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "prefill.toml"
    file.write_text('model = "/from-file"\nport = 1111\nchunk_tokens = 256\nthreads = 3\n')
    monkeypatch.setenv("DSV4PD_PREFILL_PORT", "2222")
    monkeypatch.setenv("DSV4PD_PREFILL_CHUNK_TOKENS", "768")
    found = PrefillSettings.load(["--config", str(file), "--chunk-tokens", "1024"])
    assert (found.model, found.port, found.chunk_tokens, found.threads) == (Path("/from-file"), 2222, 1024, 3)
    monkeypatch.setenv("DSV4PD_PREFILL_CONFIG", str(file))
    assert PrefillSettings.load([]).threads == 3


def test_defaults_and_negated_flags():
    assert DecodeSettings.load([*MODEL]).verify is True
    assert DecodeSettings.load([*MODEL, "--no-verify"]).verify is False
    assert RouterSettings.load([*MODEL]).addresses("prefill") == ("127.0.0.1:7001",)
    assert RouterSettings.load([*MODEL, "--decode", "a:1, b:2"]).addresses("decode") == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ([], "model"),
        ([*MODEL, "--port", "70000"], "port"),
        ([*MODEL, "--chunk-tokens", "300"], "chunk_tokens"),
        ([*MODEL, "--log-level", "loud"], "log_level"),
        ([*MODEL, "--queue-timeout-s", "0"], "queue_timeout_s"),
        ([*MODEL, "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_wrong_settings_are_named(flags: list[str], part: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as raised:
        PrefillSettings.load(flags)
    assert raised.value.code == 2
    assert part in capsys.readouterr().err


def test_unknown_keys_of_the_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "p.toml"
    file.write_text('model = "/m"\nprot = 1\n')
    with pytest.raises(SystemExit):
        PrefillSettings.load(["--config", str(file)])
    assert "prot" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nowhere", "host:", ":1", "", " , "])
def test_worker_lists_that_are_no_addresses_are_refused(text: str):
    with pytest.raises(ValueError, match="prefill"):
        RouterSettings.load([*MODEL, "--prefill", text]).addresses("prefill")
