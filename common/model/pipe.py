"""What a model that has only some of the layers needs of its neighbours."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Pipe(Protocol):
    """The stages before and behind this one, for one prefill at a time."""

    def receive(self, rows: int, streams: int, width: int) -> Tensor:
        """What the stage before made: residual streams [rows, streams, width] fp32."""
        ...

    def send(self, streams: Tensor) -> None:
        """Hands residual streams to the stage behind."""
        ...
