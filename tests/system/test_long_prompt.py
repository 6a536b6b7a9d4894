"""A prompt of 16 384 tokens: its pages leave while it is still being computed, and its first token streams."""

import grpc
import pytest

from common.kernels.cpu import cpu_kernels
from common.model.config import ModelConfig
from common.model.model_hash import model_hash
from common.model.tokenizer import load_tokenizer
from common.rpc import layout_messages, ticket_messages
from common.rpc.gen.dsv4pd.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from common.rpc.identity import new_incarnation
from common.transfer.engine import EngineSettings, TransferEngine
from common.transfer.layout import HandoverLayout
from common.transfer.ticket import RegionKind, TransferTicket
from decode_service.device_pools import DevicePools
from decode_service.hisparse import HiSparseCoordinator
from decode_service.host_pool import DeepSeekV4PagedHostPool
from decode_service.resources import ResourcePools
from decode_service.verification import HandoverCheck, LandedRange
from tests.support.cluster import Cluster
from tests.system.test_pair import prompt

pytestmark = pytest.mark.system
TOKENS = 16384


def test_pages_leave_before_the_last_chunk_and_the_first_token_streams(checkpoint, tmp_path):
    cluster = Cluster(checkpoint, tmp_path).start()
    config = ModelConfig.from_file(checkpoint)
    host = DeepSeekV4PagedHostPool(config.layers_of(4), 70, cpu_kernels(), 1)
    device = DevicePools.of(config, 70, 2, 1)
    resources = ResourcePools(host, device, HiSparseCoordinator(host, cpu_kernels(), 2, 64).slots).reserve(TOKENS)
    assert resources is not None
    regions = device.regions(host)
    transfer = TransferEngine(EngineSettings())
    for region in regions.items():
        transfer.register(region.base, region.size)
    layout = HandoverLayout.of(config, model_hash(checkpoint), load_tokenizer(checkpoint, config).hash)
    ticket = TransferTicket(
        transfer.session, "me", regions, resources.host_pages, resources.logical_pages, resources.window_slot,
        resources.state_slot, verify=True,
    )  # fmt: skip
    check = HandoverCheck(ticket, TOKENS, layout.ratios, "prefill")
    sent: list[prefill_pb2.PagesSent] = []
    done: prefill_pb2.Done | None = None
    with grpc.insecure_channel(cluster.prefill.address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        me = new_incarnation("decode")
        hello = stub.Hello(prefill_pb2.HelloRequest(caller=me, layout=layout_messages.to_message(layout)))
        request = prefill_pb2.PrefillRequest(
            key=common_pb2.RequestKey(request_id="long", generation=1),
            expected_incarnation=hello.callee.id,
            token_ids=prompt(TOKENS),
            sampling=common_pb2.SamplingParams(max_tokens=1),
            ticket=ticket_messages.to_message(ticket, me),
        )
        for event in stub.Prefill(request, timeout=200):
            if event.HasField("pages_sent"):
                sent.append(event.pages_sent)
                check.add(_ranges(event.pages_sent.digests))
            if event.HasField("done"):
                done = event.done
                check.add(_ranges(event.done.digests))
    assert done is not None
    check.check_complete()
    early = [event for event in sent if event.landed_unix_ns < done.timings.last_chunk_unix_ns]
    assert done.timings.chunks == TOKENS // 512
    assert sum(event.page_count for event in early) >= 0.9 * TOKENS / 256
    assert early[0].tokens_computed < TOKENS / 4
    answer = cluster.generate("stream", prompt(TOKENS), max_tokens=3)
    assert len(answer.tokens) == 3
    assert answer.tokens[0] == done.first_token
    cluster.wait_idle(2)
    assert cluster.stop() == [0, 0]
    transfer.close()
    del device


def _ranges(digests) -> list[LandedRange]:
    return [LandedRange(d.layer_id, RegionKind(d.kind), d.first, d.count, d.digest) for d in digests]
