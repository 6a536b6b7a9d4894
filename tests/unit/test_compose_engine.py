"""How tests/compose leaves this machine's network as it was, and what it says where no engine starts."""

from pathlib import Path

import pytest

from tests.compose import engine
from tests.compose.engine import EngineUnavailable, Network, emptied_tables, fail_or_skip, firewall_rules

OWN = "*mangle\n:PREROUTING ACCEPT [5:300]\n-A PREROUTING -j MARK\nCOMMIT\n"
DOCKERS = """# Generated
*filter
:INPUT ACCEPT [0:0]
:FORWARD DROP [0:0]
:DOCKER - [0:0]
-A FORWARD -j DOCKER
-A DOCKER -j RETURN
COMMIT
*nat
:POSTROUTING ACCEPT [0:0]
:DOCKER - [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
COMMIT
"""


def test_tables_that_were_not_loaded_before_are_emptied_and_others_left_to_the_restore():
    emptied = "*filter\n:INPUT ACCEPT [0:0]\n:FORWARD ACCEPT [0:0]\nCOMMIT\n*nat\n:POSTROUTING ACCEPT [0:0]\nCOMMIT\n"
    assert emptied_tables("", DOCKERS) == emptied_tables(OWN, OWN + DOCKERS) == emptied
    assert emptied_tables(DOCKERS, DOCKERS) == ""


def test_an_empty_table_is_no_change_and_a_rule_chain_or_policy_is():
    def network(firewall: str, links: frozenset[str] = frozenset({"lo"}), forwarding: str = "0\n") -> Network:
        return Network(links, forwarding, firewall)

    assert firewall_rules(OWN) == ["*mangle -A PREROUTING -j MARK"]
    assert network("").same_as(network(emptied_tables("", DOCKERS)))
    assert network(OWN).same_as(network(OWN.replace("[5:300]", "[9:900]")))
    for other in (DOCKERS, "*filter\n:FORWARD DROP [0:0]\nCOMMIT\n", "*nat\n:DOCKER - [0:0]\nCOMMIT\n", OWN):
        assert not network("").same_as(network(other))
    assert not network("").same_as(network("", links=frozenset({"lo", "docker0"})))
    assert not network("").same_as(network("", forwarding="1\n"))


def test_where_nothing_changed_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A daemon that can't start may stand on a machine whose /proc and firewall can't be written."""
    before = Network(frozenset({"lo"}), "0\n", OWN)
    monkeypatch.setattr(engine, "FORWARDING", tmp_path / "none" / "ip_forward")
    monkeypatch.setattr(engine.subprocess, "run", lambda *words, **options: pytest.fail(f"ran {words}"))
    monkeypatch.setattr(Network, "now", lambda: Network(frozenset({"lo"}), "0\n", emptied_tables("", DOCKERS) + OWN))
    before.restore()


def test_without_an_engine_it_fails_with_the_reason_unless_skipping_is_allowed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DSV4PD_ALLOW_NO_DOCKER", raising=False)
    with pytest.raises(pytest.fail.Exception, match=r"DSV4PD_ALLOW_NO_DOCKER=1 allows to skip\): no root"):
        fail_or_skip(EngineUnavailable("no root"))
    monkeypatch.setenv("DSV4PD_ALLOW_NO_DOCKER", "1")
    with pytest.raises(pytest.skip.Exception, match="no root"):
        fail_or_skip(EngineUnavailable("no root"))
