"""TransferTicket to and from dsv4pd.v1.TransferTicket."""

from __future__ import annotations

from common.rpc.gen.dsv4pd.v1 import common_pb2
from common.transfer.ticket import Region, RegionKind, RegionTable, TransferTicket


def regions_to_messages(regions: RegionTable) -> list[common_pb2.Region]:
    return [
        common_pb2.Region(
            layer_id=region.layer,
            kind=common_pb2.RegionKind.Name(region.kind.value),
            base=region.base,
            bytes=region.size,
            item_bytes=region.item_bytes,
            piece_bytes=region.piece_bytes,
        )
        for region in regions.items()
    ]


def to_message(ticket: TransferTicket, receiver: common_pb2.Incarnation) -> common_pb2.TransferTicket:
    return common_pb2.TransferTicket(
        session=ticket.session,
        receiver=receiver,
        regions=regions_to_messages(ticket.regions),
        host_c4_pages=ticket.host_pages,
        logical_pages=ticket.logical_pages,
        window_slot=ticket.window_slot,
        state_slot=ticket.state_slot,
        verify=ticket.verify,
        first_page=ticket.first_page,
    )


def from_message(message: common_pb2.TransferTicket) -> TransferTicket:
    """Raises ValueError for an unknown region kind, a repeated region or wrong item sizes."""
    regions = [
        Region(
            region.layer_id, RegionKind(region.kind), region.base, region.bytes, region.item_bytes, region.piece_bytes
        )
        for region in message.regions
    ]
    return TransferTicket(
        session=message.session,
        receiver_id=message.receiver.id,
        regions=RegionTable(regions),
        host_pages=tuple(message.host_c4_pages),
        logical_pages=tuple(message.logical_pages),
        window_slot=message.window_slot,
        state_slot=message.state_slot,
        verify=message.verify,
        first_page=message.first_page,
    )
