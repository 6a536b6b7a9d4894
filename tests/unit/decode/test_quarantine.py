"""When memory that is set aside is worth an alarm."""

import time

from decode_service.quarantine import Quarantine
from decode_service.resources import PoolUse


def use(quarantined: int, total: int = 10) -> list[PoolUse]:
    return [PoolUse("host_c4", total, total - quarantined, 0, quarantined)]


def test_an_alarm_for_time():
    quarantine = Quarantine(0.05, 0.5)
    assert quarantine.alarm(use(0)) == ""
    quarantine.enter(1)
    assert quarantine.alarm(use(1)) == ""
    time.sleep(0.06)
    quarantine.enter(2)
    assert "in quarantine for" in quarantine.alarm(use(1))
    assert quarantine.leave(1) >= 0.05
    assert quarantine.alarm(use(1)) == ""
    quarantine.leave(2)
    assert quarantine.oldest_s() == 0.0


def test_an_alarm_for_a_pool():
    quarantine = Quarantine(60, 0.5)
    quarantine.enter(1)
    assert quarantine.alarm(use(5)) == ""
    assert quarantine.alarm(use(6)) == "6 of 10 host_c4 are in quarantine"
