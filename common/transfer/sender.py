"""Posts writes to peers from one thread a peer, with deadlines, and knows when nothing is in flight any more.

Mooncake's answer "failed" does not mean "not written": blocks of a failed batch may land later. So every
write is submitted by itself and watched until it ends, also after its post has failed or was cancelled.
A post is *drained* when none of its writes is alive; only then may its source and its target be reused.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import structlog

from common.errors import ErrorReason, ServiceError
from common.transfer.engine import TransferEngine
from common.transfer.pace import Pace
from common.transfer.plan import Run, batches, cut, merge

POLL_S = 0.0002
IDLE_S = 0.5


@dataclass(frozen=True)
class SenderSettings:
    """Bounds of what is posted at once to one peer, of what waits, and of bytes a second to one peer (0 = none)."""

    max_run_bytes: int = 8 << 20
    max_batch_runs: int = 16
    max_batch_bytes: int = 64 << 20
    max_queued_posts: int = 1024
    max_bytes_per_s: int = 0


@dataclass(frozen=True)
class Receipt:
    """All bytes of a post are acknowledged."""

    size: int
    posted_unix_ns: int
    landed_unix_ns: int


@dataclass
class Post:
    """Some writes of one request to one peer. `done` gets a Receipt or a ServiceError; `drained` gets None
    when no write of the post is alive in this process any more, never before `done`. Where `failed` says that a
    write failed, bytes of it may still be on the network: only the receiver can fence those."""

    key: str
    session: str
    runs: list[Run]
    deadline: float
    done: Future[Receipt] = field(default_factory=lambda: Future[Receipt]())
    drained: Future[None] = field(default_factory=lambda: Future[None]())
    alive: set[int] = field(default_factory=lambda: set[int]())
    failed: bool = False


class TransferSender:
    """Thread-safe. `on_failure(reason)` is called once for each post that fails for another reason than a cancel."""

    def __init__(
        self,
        engine: TransferEngine,
        settings: SenderSettings | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings or SenderSettings()
        self._on_failure: Callable[[str], None] = on_failure or (lambda _reason: None)
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}
        self._posts: dict[str, set[int]] = {}
        self._by_id: dict[int, Post] = {}
        self._cancelled: set[str] = set()
        self._waiting: dict[str, list[Future[None]]] = {}
        self._closed = False

    def post(self, key: str, session: str, runs: Sequence[Run], deadline_s: float) -> Post:
        """Queues writes; `deadline_s` counts from the moment the peer's thread takes them up.

        Raises ValueError for a source outside registered memory and ServiceError when the key is cancelled, the
        peer's queue is full or the sender closed.
        """
        merged = cut(merge(runs, self._settings.max_run_bytes), self._engine.local_pieces)
        post = Post(key, session, merged, deadline_s)
        with self._lock:
            if self._closed:
                raise ServiceError(ErrorReason.TRANSFER_FAILED, "the sender is closed")
            if key in self._cancelled:
                raise ServiceError(ErrorReason.CANCELLED, f"request {key} is cancelled")
            peer = self._peers.get(session)
            if peer is None:
                peer = self._peers[session] = _Peer(
                    session, self._settings, self._run, self._poll_lingering, self._forget
                )
            self._posts.setdefault(key, set()).add(id(post))
            self._by_id[id(post)] = post
            try:
                peer.queue.put_nowait(post)
            except queue.Full:
                self._remove(post)
                raise ServiceError(
                    ErrorReason.TRANSFER_FAILED,
                    f"{self._settings.max_queued_posts} posts wait for {session}",
                    field="max_queued_posts",
                ) from None
        return post

    def cancel(self, key: str) -> Future[None]:
        """Stops posting for a key; the future resolves when none of its writes can land any more. The key
        stays cancelled until `forget`."""
        waiting: Future[None] = Future()
        with self._lock:
            self._cancelled.add(key)
            if self._posts.get(key):
                self._waiting.setdefault(key, []).append(waiting)
                return waiting
        waiting.set_result(None)
        return waiting

    def forget(self, key: str) -> None:
        """The request is over: its key may be used again."""
        with self._lock:
            self._cancelled.discard(key)

    def undrained(self) -> int:
        """Posts that are queued, in flight, or failed with writes that may still land."""
        with self._lock:
            return len(self._by_id)

    def close(self, timeout_s: float) -> bool:
        """Stops all posting and waits for what is in flight; returns whether all of it ended in time."""
        with self._lock:
            self._closed = True
            self._cancelled.update(self._posts)
            peers = list(self._peers.values())
        for peer in peers:
            peer.stop()
        end = time.monotonic() + timeout_s
        for peer in peers:
            peer.thread.join(max(0.0, end - time.monotonic()))
        return all(not peer.thread.is_alive() for peer in peers)

    def _forget(self, session: str) -> bool:
        """An idle peer asks to end its thread; refused when a post has just come in."""
        with self._lock:
            peer = self._peers.get(session)
            if peer is not None and peer.queue.empty():
                del self._peers[session]
                return True
            return peer is None

    def _remove(self, post: Post) -> list[Future[None]]:
        """Forgets a drained post (lock held); returns who waits for its key, if it was the key's last."""
        del self._by_id[id(post)]
        mine = self._posts[post.key]
        mine.discard(id(post))
        if mine:
            return []
        del self._posts[post.key]
        return self._waiting.pop(post.key, [])

    def _drained(self, post: Post) -> None:
        with self._lock:
            waiting = self._remove(post)
        post.drained.set_result(None)
        for future in waiting:
            future.set_result(None)

    def _stopped(self, post: Post) -> bool:
        with self._lock:
            return self._closed or post.key in self._cancelled

    def _run(self, post: Post, linger: list[Post], pace: Pace) -> None:
        """One post, on its peer's thread. Writes that outlive it go to `linger`."""
        posted = time.time_ns()
        end = time.monotonic() + post.deadline
        error: ServiceError | None = None
        try:
            for batch in batches(post.runs, self._settings.max_batch_runs, self._settings.max_batch_bytes):
                pace.wait(sum(run.size for run in batch), end, lambda: self._stopped(post))
                error = self._write(post, batch, end)
                if error is not None:
                    break
        except Exception as cause:  # noqa: BLE001 - native code; the thread must go on
            structlog.get_logger().exception("transfer engine raised", peer=post.session)
            post.failed = True
            error = ServiceError(ErrorReason.TRANSFER_FAILED, f"transfer to {post.session}: {cause!r}")
        if error is None:
            post.done.set_result(Receipt(sum(run.size for run in post.runs), posted, time.time_ns()))
        else:
            if error.reason is not ErrorReason.CANCELLED:
                self._on_failure(error.reason.name.lower())
            post.done.set_exception(error)
        if post.alive:
            linger.append(post)
        else:
            self._drained(post)

    def _write(self, post: Post, batch: list[Run], end: float) -> ServiceError | None:
        failed = late = False
        for run in batch:
            if self._stopped(post):
                return self._cancel_error(post)
            if time.monotonic() > end:
                late = True
                break
            transfer = self._engine.submit_write(post.session, run.source, run.target, run.size)
            if transfer == 0:
                failed = True
                break
            post.alive.add(transfer)
        while post.alive and time.monotonic() < end:
            failed = self._poll(post) or failed
            if self._stopped(post):
                break
            if post.alive:
                time.sleep(POLL_S)
        if failed:
            return ServiceError(
                ErrorReason.TRANSFER_FAILED, f"a write to {post.session} failed", field="session", theirs=post.session
            )
        if self._stopped(post):
            return self._cancel_error(post)
        if late or post.alive:
            return ServiceError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"writes to {post.session} did not end within {post.deadline:g} s",
                field="transfer_timeout_s",
                ours=post.deadline,
            )
        return None

    def _poll(self, post: Post) -> bool:
        """Drops ended writes; returns whether one of them failed."""
        failed = False
        for transfer in list(post.alive):
            state = self._engine.check(transfer)
            if state != "running":
                post.alive.discard(transfer)
                failed = failed or state == "failed"
        post.failed = post.failed or failed
        return failed

    def _cancel_error(self, post: Post) -> ServiceError:
        return ServiceError(ErrorReason.CANCELLED, f"transfer of {post.key} was cancelled")

    def _poll_lingering(self, linger: list[Post]) -> None:
        """Watches writes whose posts are over; called by the peers' threads."""
        for post in list(linger):
            self._poll(post)
            if not post.alive:
                linger.remove(post)
                self._drained(post)


class _Peer:
    """The thread that writes to one peer; ends itself when it has been idle for a while."""

    def __init__(
        self,
        session: str,
        settings: SenderSettings,
        run: Callable[[Post, list[Post], Pace], None],
        poll: Callable[[list[Post]], None],
        forget: Callable[[str], bool],
    ) -> None:
        self.session = session
        self.queue: queue.Queue[Post | None] = queue.Queue(settings.max_queued_posts + 1)
        self._run = run
        self._forget = forget
        self._linger: list[Post] = []
        self._poll = poll
        self._pace = Pace(settings.max_bytes_per_s)
        self.thread = threading.Thread(target=self._loop, name=f"send-{session}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.queue.put(None)

    def _loop(self) -> None:
        stopping = False
        while True:
            self._poll(self._linger)
            try:
                wait = POLL_S * 10 if self._linger else IDLE_S
                post = self.queue.get(timeout=wait)
            except queue.Empty:
                if not self._linger and (stopping or self._forget(self.session)):
                    return
                continue
            if post is None:
                stopping = True
            else:
                self._run(post, self._linger, self._pace)
            if stopping and self.queue.empty() and not self._linger:
                return
