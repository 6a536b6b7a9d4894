"""Typed errors and layouts on the wire."""

import dataclasses

import grpc
import grpc.aio
import pytest
from google.rpc import status_pb2

from common.errors import ErrorReason, ServiceError
from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.rpc import layout_messages
from common.rpc.errors import from_rpc_error, to_status
from common.rpc.gen.dsv4pd.v1 import common_pb2
from common.transfer.layout import HandoverLayout, differences

LAYOUT = HandoverLayout.of(ModelConfig.from_dict(small_config()), "m", "t")


def test_reasons_match_the_proto_by_name_and_number():
    in_proto = {n.removeprefix("ERROR_REASON_"): v for n, v in common_pb2.ErrorReason.items() if v}
    assert in_proto == {reason.name: reason.value for reason in ErrorReason}


@pytest.mark.parametrize("reason", list(ErrorReason))
def test_an_error_survives_its_status(reason: ErrorReason):
    sent = ServiceError(reason, "what happened", field="f", ours=1, theirs="2", retry_after_s=0.5)
    status = to_status(sent)
    received = from_rpc_error(
        grpc.aio.AioRpcError(
            status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
        ),
        ErrorReason.PREFILL_UNAVAILABLE,
    )
    for name in ("reason", "message", "field", "ours", "theirs", "retry_after_s"):
        assert getattr(received, name) == getattr(sent, name)


def test_a_reason_that_only_a_newer_peer_knows_falls_back_on_the_status_code():
    status = to_status(ServiceError(ErrorReason.QUEUE_FULL, "what happened", retry_after_s=0.5))
    ((key, value),) = status.trailing_metadata
    details = status_pb2.Status.FromString(value)
    detail = common_pb2.ErrorDetail(message="what happened", retry_after_s=0.5)
    detail.reason = 4242  # type: ignore[assignment]
    details.details[0].Pack(detail)
    received = from_rpc_error(
        grpc.aio.AioRpcError(
            status.code, grpc.aio.Metadata(), grpc.aio.Metadata((key, details.SerializeToString())), status.details
        ),
        ErrorReason.PREFILL_UNAVAILABLE,
    )
    assert received.reason is ErrorReason.QUEUE_FULL
    assert received.message == "what happened (reason 4242, which this build does not know)"
    assert received.retry_after_s == 0.5


def test_an_unreachable_peer_is_what_the_caller_says_it_is():
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")
    assert from_rpc_error(error, ErrorReason.DECODE_UNAVAILABLE).reason is ErrorReason.DECODE_UNAVAILABLE


def test_a_layout_survives_its_message():
    assert layout_messages.from_message(layout_messages.to_message(LAYOUT)) == LAYOUT


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(HandoverLayout)])
def test_every_field_that_differs_is_named_with_both_values(field: str):
    value = getattr(LAYOUT, field)
    other = ((0, 4),) if field == "ratios" else value + 1 if isinstance(value, int) else value + "x"
    theirs = dataclasses.replace(LAYOUT, **{field: other})
    assert [d.field for d in differences(LAYOUT, theirs)] == [field]
    with pytest.raises(ServiceError) as raised:
        layout_messages.check_same(LAYOUT, theirs, "peer")
    assert (raised.value.reason, raised.value.field) == (ErrorReason.LAYOUT_MISMATCH, field)
    assert raised.value.ours == str(value)
    assert raised.value.theirs == str(other)


def test_all_fields_that_differ_are_listed_with_both_values():
    theirs = dataclasses.replace(LAYOUT, model_hash="other", c4_page_bytes=1, ratios=((0, 128),))
    with pytest.raises(ServiceError) as raised:
        layout_messages.check_same(LAYOUT, theirs, "prefill x")
    assert raised.value.message == (
        f"prefill x has model_hash = other, this process has {LAYOUT.model_hash}; "
        f"ratios = ((0, 128),), this process has {LAYOUT.ratios}; "
        f"c4_page_bytes = 1, this process has {LAYOUT.c4_page_bytes}"
    )
