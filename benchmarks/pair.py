"""A prefill and decode services of one checkpoint for benchmarks, and one timed request to them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch

from common.rpc.gen.dsv4pd.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.processes import Service


@dataclass(frozen=True)
class Timed:
    """One request: seconds from the call to its first token, and what the services measured."""

    ttft_s: float
    finished: decode_pb2.Finished


def prompt(length: int, vocabulary: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, vocabulary, (length,), generator=generator).tolist()


def start(package: str, folder: Path, model: Path, *flags: str, threads: int = 2, name: str = "") -> Service:
    return Service(
        package, folder, "--model", str(model), "--threads", str(threads), *flags, threads=threads, name=name
    ).start()


def ask(decode: Service, prefill: Service, token_ids: Sequence[int], max_tokens: int = 1) -> Timed:
    """Raises grpc.RpcError."""
    request = decode_pb2.GenerateRequest(
        request_id=secrets.token_hex(8),
        prefill_address=prefill.address,
        token_ids=token_ids,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    with grpc.insecure_channel(decode.address) as channel:
        begun = time.perf_counter()
        first = 0.0
        for event in decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=600):
            if event.HasField("tokens") and not first:
                first = time.perf_counter() - begun
            if event.HasField("finished"):
                return Timed(first, event.finished)
    raise RuntimeError("the stream ended without a result")
