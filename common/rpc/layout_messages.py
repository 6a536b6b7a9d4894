"""HandoverLayout to and from dsv4pd.v1.KVLayout."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from common.errors import ErrorReason, ServiceError
from common.rpc.gen.dsv4pd.v1 import common_pb2
from common.transfer.layout import HandoverLayout, differences


def to_message(layout: HandoverLayout) -> common_pb2.KVLayout:
    values: dict[str, Any] = asdict(layout)
    ratios: tuple[tuple[int, int], ...] = values.pop("ratios")
    layers = [common_pb2.LayerLayout(layer_id=layer, ratio=ratio) for layer, ratio in ratios]
    return common_pb2.KVLayout(layers=layers, **values)


def from_message(message: common_pb2.KVLayout) -> HandoverLayout:
    names = [field.name for field in fields(HandoverLayout) if field.name != "ratios"]
    values = {name: getattr(message, name) for name in names}
    return HandoverLayout(ratios=tuple((layer.layer_id, layer.ratio) for layer in message.layers), **values)


def check_same(ours: HandoverLayout, theirs: HandoverLayout, peer: str) -> None:
    """Raises ServiceError(LAYOUT_MISMATCH) that names every field that differs and both values of each."""
    found = differences(ours, theirs)
    if found:
        first = found[0]
        all_of_them = "; ".join(f"{d.field} = {d.theirs}, this process has {d.ours}" for d in found)
        raise ServiceError(
            ErrorReason.LAYOUT_MISMATCH,
            f"{peer} has {all_of_them}",
            field=first.field,
            ours=first.ours,
            theirs=first.theirs,
        )
