"""Requests of one session, or with one prefix, stay together as long as load allows."""

import pytest

from common.rpc.channels import open_channel
from router_service.placement import choose_decode, choose_prefill, prefix_key
from router_service.worker import Role, Worker
from tests.unit.router.conftest import ServeRouter
from tests.unit.router.scripted_worker import ScriptedWorker


def worker(role: Role, name: str, load: float) -> Worker:
    return Worker(role, f"{name}:1", open_channel(f"{name}:1"), True, usable=True, load=load, context=10_000)


async def test_a_session_keeps_its_workers_whatever_the_load_up_to_the_slack():
    decodes = [worker("decode", f"d{n}", 100) for n in range(5)]
    prefills = [worker("prefill", f"p{n}", 0) for n in range(5)]
    decode = choose_decode(decodes, 1000, "session-1")
    prefill = choose_prefill(prefills, 1000, "session-1", 500)
    decode.load, prefill.load = 4, 500
    assert choose_decode(decodes, 1000, "session-1") is decode
    assert choose_prefill(prefills, 1000, "session-1", 500) is prefill
    decode.load, prefill.load = 3, 501  # 1000 tokens are 4 pages
    assert choose_decode(decodes, 1000, "session-1") is not decode
    assert choose_prefill(prefills, 1000, "session-1", 500) is not prefill


async def test_sessions_spread_and_a_lost_worker_moves_only_its_own():
    prefills = [worker("prefill", f"p{n}", 0) for n in range(4)]
    before = {n: choose_prefill(prefills, 10, f"s{n}", 0) for n in range(200)}
    shares = [sum(w is each for w in before.values()) for each in prefills]
    assert min(shares) > 25
    prefills[0].usable = False
    after = {n: choose_prefill(prefills, 10, f"s{n}", 0) for n in range(200)}
    assert all(after[n] is before[n] for n in before if before[n] is not prefills[0])


@pytest.mark.parametrize(("tokens", "wanted"), [([1, 2, 3], ""), ([1, 2, 3, 4], "same"), ([1, 2, 3, 4, 9], "same"), ([0, 2, 3, 4], "other")])  # fmt: skip
def test_the_prefix_is_named_by_its_first_tokens_alone(tokens: list[int], wanted: str):
    same = prefix_key([1, 2, 3, 4, 5], 4)
    found = prefix_key(tokens, 4)
    assert (found == "", found == same) == (wanted == "", wanted == "same")


async def test_prompts_with_one_prefix_and_requests_of_one_session_go_to_one_worker(serve_router: ServeRouter):
    prefills = [ScriptedWorker() for _ in range(4)]
    decodes = [ScriptedWorker() for _ in range(3)]
    router = await serve_router(decodes, prefills, prefix_affinity_tokens=8)
    for n in range(6):
        await router.post(prompt=f"common prefix {n}")
    asked = {r.prefill_address for worker in decodes for r in worker.requests}
    assert len(asked) == 1
    for worker in decodes:
        worker.requests.clear()
    for n in range(6):
        await router.post({"x-session-id": "s"}, prompt=f"{n}")
    assert sorted(len(worker.requests) for worker in decodes) == [0, 0, 6]
    assert len({r.prefill_address for worker in decodes for r in worker.requests}) == 1
