"""Several prefill processes that compute one prompt together, over torch.distributed (gloo).

Process i is tensor rank i % ranks of pipeline stage i // ranks. Process 0 leads: it has the gRPC server, schedules,
samples, and tells the others what to do; they compute their layers, pack and send their own share of pages, and report
what landed. Commands are broadcast in order, so that all compute the same steps; reports come to the leader's threads.
Tensor ranks compute the same chunk in full, whose rows they all hold, and divide its sending.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ErrorReason
from common.transfer.sender import Receipt
from common.transfer.ticket import TransferTicket
from prefill_service.packing import SentRange

FOR_EVER = timedelta(days=3650)


@dataclass(frozen=True)
class Open:
    """A prompt begins."""

    key: str
    token_ids: tuple[int, ...]
    ticket: TransferTicket
    transfer_timeout_s: float


@dataclass(frozen=True)
class StepChunk:
    key: str
    start: int
    end: int
    logits: Literal["none", "last", "all"]


@dataclass(frozen=True)
class Step:
    """Compute these chunks in one pass, then send what is complete."""

    chunks: tuple[StepChunk, ...]


@dataclass(frozen=True)
class Drop:
    """A prompt is over: nothing more of it is posted."""

    key: str


@dataclass(frozen=True)
class Stop:
    """The service ends."""


Command = Open | Step | Drop | Stop


@dataclass(frozen=True)
class Sent:
    """A post landed."""

    key: str
    first_page: int
    page_count: int
    computed: int
    receipt: Receipt
    ranges: tuple[SentRange, ...]


@dataclass(frozen=True)
class AllSent:
    """Everything that this process had to send landed; `ranges` is what no Sent named."""

    key: str
    ranges: tuple[SentRange, ...]
    rest_bytes: int


@dataclass(frozen=True)
class Failed:
    key: str
    reason: ErrorReason
    message: str


@dataclass(frozen=True)
class Gone:
    """Nothing of the prompt can be written by this process any more; `writes_failed` as in PrefillJob."""

    key: str
    writes_failed: bool


@dataclass(frozen=True)
class Bye:
    """The last report."""


Report = Sent | AllSent | Failed | Gone | Bye


class TeamLostError(RuntimeError):
    """Another process of the team is gone; this one can't go on."""


class Team:
    """Implements Pipe. Commands and tensors are for the computing thread; reports have a thread each."""

    def __init__(self, stages: int, ranks: int, index: int, rendezvous: str, timeout_s: float) -> None:
        """Waits for all others. Raises TeamLostError when they don't come within `timeout_s`, ValueError."""
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"rendezvous {rendezvous!r} is not host:port")
        self.size = stages * ranks
        if not 0 <= index < self.size:
            raise ValueError(f"rank {index} of {stages} stages of {ranks} ranks")
        self.index = index
        self._ranks = ranks
        self._last = (stages - 1) * ranks
        try:
            store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                host, int(port), self.size, index == 0, timedelta(seconds=timeout_s)
            )
            dist.init_process_group("gloo", store=store, rank=index, world_size=self.size, timeout=FOR_EVER)
            self._commands: Any = dist.new_group(timeout=FOR_EVER)
            self._reports: list[Any] = [dist.new_group([0, other], timeout=FOR_EVER) for other in range(1, self.size)]
        except (RuntimeError, dist.DistError) as error:
            raise TeamLostError(f"the team of {self.size} did not meet at {rendezvous}: {error}") from None

    def command(self, command: Command) -> None:
        """Leader: tells everybody. Raises TeamLostError."""
        self._broadcast([command])

    def next_command(self) -> Command:
        """Follower: waits for the leader. Raises TeamLostError."""
        return self._broadcast([None])

    def report(self, report: Report) -> None:
        """Follower: tells the leader. Raises TeamLostError."""
        try:
            dist.send_object_list([report], dst=0, group=self._reports[self.index - 1])
        except RuntimeError as error:
            raise TeamLostError(f"leader: {error}") from None

    def next_report(self, other: int) -> Report:
        """Leader: waits for process `other`. Raises TeamLostError."""
        box: list[Any] = [None]
        try:
            dist.recv_object_list(box, src=other, group=self._reports[other - 1])
        except RuntimeError as error:
            raise TeamLostError(f"process {other}: {error}") from None
        return box[0]

    def leave(self) -> None:
        """When nothing is waited for any more."""
        dist.destroy_process_group()

    def receive(self, rows: int, streams: int, width: int) -> Tensor:
        found = torch.empty(rows, streams, width)
        self._exchange(lambda: dist.recv(found, src=self.index - self._ranks))
        return found

    def send(self, streams: Tensor) -> None:
        self._exchange(lambda: dist.send(streams.cpu().contiguous(), dst=self.index + self._ranks))

    def send_logits(self, logits: Sequence[Tensor | None]) -> None:
        """First rank of the last stage: what the leader samples from."""
        wanted = [rows.view(-1, rows.shape[-1]).cpu() for rows in logits if rows is not None]
        if wanted and self.index == self._last and self.index:
            self._exchange(lambda: dist.send(torch.cat(wanted), dst=0))

    def receive_logits(self, shapes: Sequence[tuple[int, ...] | None]) -> list[Tensor | None]:
        """Leader: one tensor for each shape."""
        rows = sum(shape[0] if len(shape) == 2 else 1 for shape in shapes if shape is not None)
        if not rows:
            return [None] * len(shapes)
        width = next(shape[-1] for shape in shapes if shape is not None)
        together = torch.empty(rows, width)
        self._exchange(lambda: dist.recv(together, src=self._last))
        found: list[Tensor | None] = []
        begin = 0
        for shape in shapes:
            if shape is None:
                found.append(None)
                continue
            count = shape[0] if len(shape) == 2 else 1
            found.append(together[begin : begin + count].view(shape))
            begin += count
        return found

    def _broadcast(self, box: list[Any]) -> Any:
        try:
            dist.broadcast_object_list(box, src=0, group=self._commands)
        except RuntimeError as error:
            raise TeamLostError(f"commands: {error}") from None
        return box[0]

    def _exchange(self, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:
            raise TeamLostError(f"tensors: {error}") from None
