"""Who of several prefill ranks sends what: pure arithmetic over layers, pages and ring runs.

Pipeline stages hold different layers and send those, under their global ids. The tensor ranks of a stage hold the same
KV rows and share them: pages in contiguous shares, so that runs still merge, ring runs one by one. Shares rotate by
layer, so that single pages and odd remainders don't all fall to the first rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def split(count: int, parts: int, index: int) -> tuple[int, int]:
    """(first, size) of part `index` when `count` things are split into `parts` as evenly as they go; the first parts
    get one more. Raises ValueError."""
    if count < 0 or parts < 1 or not 0 <= index < parts:
        raise ValueError(f"part {index} of {parts} of {count} things")
    small, larger = divmod(count, parts)
    return index * small + min(index, larger), small + (index < larger)


def stage_layers(layers: int, stages: int, sizes: Sequence[int] = ()) -> tuple[range, ...]:
    """Global layer ids of each stage, in order: as even as it goes, or of the given sizes.

    Raises ValueError when there are fewer layers than stages or the sizes don't fit.
    """
    if not sizes:
        sizes = [split(layers, stages, stage)[1] for stage in range(stages)]
    if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
        raise ValueError(f"{stages} stages of {list(sizes)} layers are not {layers} layers, at least one each")
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(stages))


@dataclass(frozen=True)
class Place:
    """Where a prefill rank stands: its layers' global ids, and which of `ranks` tensor ranks of its stage it is."""

    layers: tuple[int, ...]
    rank: int = 0
    ranks: int = 1

    @classmethod
    def whole(cls, layers: int) -> Place:
        """The only rank there is."""
        return cls(tuple(range(layers)))

    def share_of_pages(self, layer: int, count: int) -> tuple[int, int]:
        """(first, size) of this rank's share of `count` pages of one layer; size 0 for none, also of a layer of
        another stage."""
        if layer not in self.layers:
            return 0, 0
        return split(count, self.ranks, (self.rank + layer) % self.ranks)

    def sends_run(self, layer: int, index: int) -> bool:
        """Whether this rank sends the layer's ring run `index` (window rows and states, counted together)."""
        return layer in self.layers and (index + layer) % self.ranks == self.rank


def places(layers: int, stages: int, ranks: int, sizes: Sequence[int] = ()) -> tuple[Place, ...]:
    """All places of a grid, stage by stage: place i is stage i // ranks, rank i % ranks. Raises ValueError."""
    if ranks < 1:
        raise ValueError(f"{ranks} tensor ranks")
    found = stage_layers(layers, stages, sizes)
    return tuple(Place(tuple(found[stage]), rank, ranks) for stage in range(stages) for rank in range(ranks))
