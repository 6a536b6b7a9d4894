"""What decode makes of a prefill service that restarts, lies, is mute or is gone; the peer is a small gRPC server."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from common.errors import ErrorReason, ServiceError
from common.kernels.cpu import cpu_kernels
from common.kv.handover import Handover
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.rpc import layout_messages
from common.rpc.channels import make_server
from common.rpc.errors import abort
from common.rpc.gen.dsv4pd.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from common.rpc.identity import new_incarnation
from common.sampling import SamplingSettings, SamplingState
from common.transfer.digest import digest_of
from common.transfer.layout import HandoverLayout
from common.transfer.ticket import RegionKind, TransferTicket, kinds_of_ratio
from decode_service import prefill_client
from decode_service.device_pools import DevicePools
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.metrics import DecodeMetrics
from decode_service.prefill_client import PrefillPeer
from decode_service.request import DecodeRequest
from decode_service.settings import DecodeSettings
from decode_service.verification import HandoverCheck, LandedRange

CONFIG = ModelConfig.from_dict(small_config())
LAYOUT = HandoverLayout.of(CONFIG, "model", "tokenizer")
RATIOS = tuple(enumerate(CONFIG.compress_ratios))
TOKENS = 5
Events = Callable[[prefill_pb2.PrefillRequest], list[prefill_pb2.PrefillEvent]]


class FakePrefill(prefill_pb2_grpc.PrefillServicer):
    """Answers Prefill with `events`; `mute` calls answer nothing at all."""

    def __init__(
        self, events: Events | None = None, mute: tuple[str, ...] = (), layout: HandoverLayout = LAYOUT
    ) -> None:
        self.me = new_incarnation("prefill")
        self.events = events
        self.mute = mute
        self.layout = layout
        self.cancelled = prefill_pb2.CancelReply.STATE_DRAINED
        self.calls: list[str] = []
        self.server: Any = None

    async def start(self, port: int = 0) -> int:
        self.server = make_server()
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server)
        bound = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()
        return bound

    async def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.mute:
            await asyncio.sleep(60)

    async def Hello(self, request: Any, context: Any) -> prefill_pb2.HelloReply:
        await self._enter("Hello")
        return prefill_pb2.HelloReply(callee=self.me, layout=layout_messages.to_message(self.layout))

    async def Prefill(self, request: Any, context: Any) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        await self._enter("Prefill")
        if request.expected_incarnation != self.me.id:
            await abort(context, ServiceError(ErrorReason.STALE_GENERATION, "restarted"))
        for event in self.events(request) if self.events else []:
            yield event

    async def Cancel(self, request: Any, context: Any) -> prefill_pb2.CancelReply:
        await self._enter("Cancel")
        return prefill_pb2.CancelReply(state=self.cancelled, callee=self.me)


class Receiver:
    """Decode's memory, with random bytes where a handover would have landed."""

    def __init__(self) -> None:
        self.host = DeepSeekV4PagedHostPool(CONFIG.layers_of(4), 4, cpu_kernels())
        self.device = DevicePools.of(CONFIG, 4, 2)
        self.ticket = TransferTicket("s", "me", self.device.regions(self.host), (2,), (1,), 1, 0, verify=True)
        self.request = DecodeRequest(
            "r", 77, [5] * TOKENS, SamplingState(SamplingSettings(), [5] * TOKENS, (1,)), lambda _event: None
        )

    def digests(self) -> list[prefill_pb2.RangeDigest]:
        check, handover = HandoverCheck(self.ticket, TOKENS, RATIOS, ""), Handover(TOKENS)
        found: list[prefill_pb2.RangeDigest] = []
        for layer, ratio in RATIOS:
            for kind in kinds_of_ratio(ratio):
                if kind in (RegionKind.C4, RegionKind.INDEX):
                    parts = [(0, 1)]
                elif kind is RegionKind.C128:
                    parts = []
                else:
                    runs = handover.window_runs() if kind is RegionKind.WINDOW else handover.state_runs(ratio)
                    parts = [(run.row, run.count) for run in runs]
                for first, count in parts:
                    digest = digest_of(check._pieces(LandedRange(layer, kind, first, count, b"")))
                    found.append(
                        prefill_pb2.RangeDigest(
                            layer_id=layer, kind=kind.value, first=first, count=count, digest=digest
                        )
                    )
        return found

    def done(self, leave_out: int = 0, generation: int = 77) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(
            key=common_pb2.RequestKey(request_id="r", generation=generation),
            done=prefill_pb2.Done(first_token=9, digests=self.digests()[leave_out:]),
        )


class FakeLandings:
    """Counts sessions and fences; a session is named by its writer."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.fenced: list[str] = []

    async def open(self, incarnation: str) -> str:
        self.opened.append(incarnation)
        return f"session of {incarnation}"

    async def fence(self, incarnation: str, session: str) -> bool:
        self.fenced.append(incarnation)
        return True

    async def retire(self, incarnation: str) -> None:
        self.fenced.append(incarnation)


def make_peer(port: int, metrics: DecodeMetrics | None = None, landings: Any = None, **settings: float) -> PrefillPeer:
    made = DecodeSettings.load(
        ["--model", "/m", *(f"--{name.replace('_', '-')}={value}" for name, value in settings.items())]
    )
    return PrefillPeer(
        f"127.0.0.1:{port}",
        made,
        LAYOUT,
        new_incarnation("decode"),
        metrics or DecodeMetrics(),
        landings or FakeLandings(),
    )


async def test_a_whole_handover_is_accepted():
    receiver = Receiver()
    fake = FakePrefill(lambda _: [receiver.done()])
    peer = make_peer(await fake.start())
    found = await peer.run(receiver.request, receiver.ticket)
    assert found.first_token.token_id == 9
    assert receiver.request.peer.endswith(fake.me.id)
    await peer.close()
    await fake.server.stop(0)


async def test_a_restarted_service_is_used_although_the_channel_still_backs_off():
    receiver = Receiver()
    first = FakePrefill(lambda _: [receiver.done()])
    port = await first.start()
    peer = make_peer(port)
    await peer.run(receiver.request, receiver.ticket)
    await first.server.stop(0)
    # Failing for a while brings the channel's back-off to its longest.
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        with pytest.raises(ServiceError) as raised:
            await peer.run(receiver.request, receiver.ticket)
        assert raised.value.reason is ErrorReason.PREFILL_UNAVAILABLE
        await asyncio.sleep(0.05)
    second = FakePrefill(lambda _: [receiver.done()])
    await second.start(port)
    await peer.run(receiver.request, receiver.ticket)
    assert receiver.request.peer.endswith(second.me.id)
    await peer.close()
    await second.server.stop(0)


async def test_a_service_that_restarted_unnoticed_refuses_once_and_is_asked_again():
    receiver = Receiver()
    fake, landings, sessions = FakePrefill(), FakeLandings(), list[str]()

    def events(request: Any) -> list[prefill_pb2.PrefillEvent]:
        sessions.append(request.ticket.session)
        return [receiver.done()]

    fake.events = events
    peer = make_peer(await fake.start(), landings=landings)
    await peer.run(receiver.request, receiver.ticket)
    before, fake.me = fake.me, new_incarnation("prefill")
    await peer.run(receiver.request, receiver.ticket)
    # The old incarnation's session is over, the new one has its own.
    assert set(landings.fenced) == {before.id}
    assert sessions == [f"session of {before.id}", f"session of {fake.me.id}"]
    assert fake.calls == ["Hello", "Prefill", "Prefill", "Hello", "Prefill"]
    assert receiver.request.peer.endswith(fake.me.id)
    await peer.close()
    await fake.server.stop(0)


async def test_a_mute_service_costs_those_who_wait_one_time_out_not_one_each():
    receiver = Receiver()
    fake = FakePrefill(mute=("Hello",))
    peer = make_peer(await fake.start(), handshake_timeout_s=0.3)
    begun = time.monotonic()
    found = await asyncio.gather(
        *(peer.run(receiver.request, receiver.ticket) for _ in range(8)), return_exceptions=True
    )
    assert time.monotonic() - begun < 1.2
    assert all(isinstance(e, ServiceError) and e.reason is ErrorReason.DEADLINE_EXCEEDED for e in found)
    assert fake.calls == ["Hello"]
    # The next one asks again.
    fake.mute = ()
    fake.events = lambda _: [receiver.done()]
    await peer.run(receiver.request, receiver.ticket)
    await peer.close()
    await fake.server.stop(0)


async def test_a_caller_that_leaves_does_not_take_the_handshake_from_the_others():
    fake = FakePrefill()
    peer = make_peer(await fake.start())
    leaving, staying = asyncio.create_task(peer.hello()), asyncio.create_task(peer.hello())
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == fake.me.id
    await peer.close()
    await fake.server.stop(0)


async def test_another_layout_is_refused_with_the_field_and_both_values():
    other = HandoverLayout.of(CONFIG, "another model", "tokenizer")
    fake = FakePrefill(layout=other)
    peer = make_peer(await fake.start())
    with pytest.raises(ServiceError) as raised:
        await peer.hello()
    assert raised.value.reason is ErrorReason.LAYOUT_MISMATCH
    assert (raised.value.field, raised.value.ours, raised.value.theirs) == ("model_hash", "model", "another model")
    await peer.close()
    await fake.server.stop(0)


async def test_events_of_another_generation_are_ignored_and_counted():
    receiver, metrics = Receiver(), DecodeMetrics()
    fake = FakePrefill(lambda _: [receiver.done(generation=76), receiver.done()])
    peer = make_peer(await fake.start(), metrics)
    await peer.run(receiver.request, receiver.ticket)
    assert metrics.registry.get_sample_value("dsv4pd_decode_late_events_total") == 1
    await peer.close()
    await fake.server.stop(0)


async def test_an_event_that_comes_twice_is_ignored_and_counted():
    receiver, metrics = Receiver(), DecodeMetrics()
    digests = receiver.digests()
    sent = prefill_pb2.PrefillEvent(
        key=common_pb2.RequestKey(request_id="r", generation=77),
        pages_sent=prefill_pb2.PagesSent(page_count=1, digests=digests[:2]),
    )
    fake = FakePrefill(lambda _: [sent, sent, receiver.done(leave_out=2)])
    peer = make_peer(await fake.start(), metrics)
    await peer.run(receiver.request, receiver.ticket)
    assert metrics.registry.get_sample_value("dsv4pd_decode_late_events_total") == 2
    await peer.close()
    await fake.server.stop(0)


@pytest.mark.parametrize(
    ("events", "reason", "part"),
    [
        (lambda r: [r.done(leave_out=1)], ErrorReason.TRANSFER_FAILED, "never came"),
        (lambda r: [], ErrorReason.PREFILL_FAILED, "without a result"),
        (lambda r: [r.done(generation=1)], ErrorReason.PREFILL_FAILED, "without a result"),
    ],
    ids=["a part is missing", "no result", "only a stranger's result"],
)
async def test_an_incomplete_handover_fails(events: Callable[[Receiver], list], reason: ErrorReason, part: str):
    receiver = Receiver()
    fake = FakePrefill(lambda _: events(receiver))
    peer = make_peer(await fake.start())
    with pytest.raises(ServiceError, match=part) as raised:
        await peer.run(receiver.request, receiver.ticket)
    assert raised.value.reason is reason
    await peer.close()
    await fake.server.stop(0)


@pytest.mark.parametrize("kind", [0, 8, 99])
@pytest.mark.parametrize("event", ["pages_sent", "done"])
async def test_an_unknown_component_fails_the_handover_by_its_number(kind: int, event: str):
    """A newer prefill may send a kind that this build does not know; to skip it would decode from stale rows."""
    receiver = Receiver()
    stranger = prefill_pb2.RangeDigest(layer_id=1, first=0, count=1)
    stranger.kind = kind  # type: ignore[assignment]
    sent = receiver.done()
    if event == "done":
        sent.done.digests.append(stranger)
    else:
        sent = prefill_pb2.PrefillEvent(key=sent.key, pages_sent=prefill_pb2.PagesSent(digests=[stranger]))
    fake = FakePrefill(lambda _: [sent])
    peer = make_peer(await fake.start())
    with pytest.raises(ServiceError, match=f"kind {kind} of layer 1") as raised:
        await peer.run(receiver.request, receiver.ticket)
    assert raised.value.reason is ErrorReason.TRANSFER_FAILED
    assert (raised.value.field, raised.value.theirs) == ("kind", str(kind))
    await peer.close()
    await fake.server.stop(0)


async def test_a_byte_that_changed_on_the_way_fails_the_handover():
    receiver = Receiver()
    sent = receiver.done()
    receiver.device.window[0][1, 3 * 576] ^= 1
    fake = FakePrefill(lambda _: [sent])
    peer = make_peer(await fake.start())
    with pytest.raises(ServiceError) as raised:
        await peer.run(receiver.request, receiver.ticket)
    assert raised.value.reason is ErrorReason.DIGEST_MISMATCH
    assert raised.value.field == "WINDOW.0"
    await peer.close()
    await fake.server.stop(0)


async def test_a_service_that_forgets_its_own_deadlines_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefill_client, "GRACE_S", 0.1)
    receiver = Receiver()
    fake = FakePrefill(mute=("Prefill",))
    peer = make_peer(await fake.start(), prefill_queue_timeout_s=0.1, prefill_timeout_s=0.1)
    begun = time.monotonic()
    with pytest.raises(ServiceError) as raised:
        await peer.run(receiver.request, receiver.ticket)
    assert time.monotonic() - begun < 2
    assert raised.value.reason is ErrorReason.DEADLINE_EXCEEDED
    await peer.close()
    await fake.server.stop(0)


async def test_drain_tells_drained_from_gone_from_unknown():
    receiver = Receiver()
    fake = FakePrefill(lambda _: [receiver.done()])
    port = await fake.start()
    peer = make_peer(port, cancel_timeout_s=0.2)
    # Nothing was ever sent for it, so nobody can write.
    assert await peer.drain(receiver.request) == "drained"
    assert fake.calls == []
    await peer.run(receiver.request, receiver.ticket)
    assert await peer.drain(receiver.request) == "drained"
    fake.cancelled = prefill_pb2.CancelReply.STATE_DRAINED_AFTER_FAILURE
    assert await peer.drain(receiver.request) == "failed"
    fake.mute = ("Cancel",)
    assert await peer.drain(receiver.request) == "unknown"
    fake.mute, before = (), fake.me
    fake.me = new_incarnation("prefill")
    assert await peer.drain(receiver.request) == "gone"
    fake.me = before
    await fake.server.stop(0)
    assert await peer.drain(receiver.request) == "gone"
    # Somebody who speaks no gRPC listens there now: no proof of anything.
    with socket.create_server(("127.0.0.1", port)):
        assert await peer.drain(receiver.request) == "unknown"
    await peer.close()
