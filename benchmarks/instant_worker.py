"""A decode and prefill worker over the real gRPC contract that computes nothing: it sends a token of every stream at a
fixed rate and notes when. At SIGTERM it writes those times, by request id, as JSON."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from common.rpc.channels import listen, make_server
from common.rpc.gen.dsv4pd.v1 import admin_pb2, admin_pb2_grpc, decode_pb2

TOKEN = 70  # an ASCII letter in the byte tokenizer: every token completes one character
RESERVED = decode_pb2.GenerateEvent(reserved=decode_pb2.Reserved()).SerializeToString()
ONE_TOKEN = decode_pb2.GenerateEvent(tokens=decode_pb2.Tokens(token_ids=[TOKEN])).SerializeToString()
FINISHED = decode_pb2.GenerateEvent(
    finished=decode_pb2.Finished(reason=decode_pb2.FINISH_REASON_LENGTH)
).SerializeToString()


class Worker(admin_pb2_grpc.AdminServicer):
    def __init__(self, rate: float) -> None:
        self.interval_s = 1 / rate if rate else 0.0
        self.sent: dict[str, array[int]] = {}

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.GetStatusReply:
        pools = [admin_pb2.PoolStatus(name="host_c4", total=1 << 20, free=1 << 20)]
        return admin_pb2.GetStatusReply(ready=True, max_context_tokens=1 << 20, pools=pools)

    async def generate(self, request: decode_pb2.GenerateRequest, context: Any) -> None:
        """Messages are sent as bytes that were made once: this process must not be what is measured."""
        times = self.sent[request.request_id] = array("q")
        await context.write(RESERVED)
        due = time.monotonic()
        for _ in range(request.sampling.max_tokens):
            if self.interval_s:
                due += self.interval_s
                await asyncio.sleep(due - time.monotonic())
            times.append(time.monotonic_ns())
            await context.write(ONE_TOKEN)
        await context.write(FINISHED)


async def serve(rate: float, port_file: Path, times_file: Path) -> None:
    worker, server = Worker(rate), make_server()
    admin_pb2_grpc.add_AdminServicer_to_server(worker, server)
    generate = grpc.unary_stream_rpc_method_handler(
        worker.generate, request_deserializer=decode_pb2.GenerateRequest.FromString, response_serializer=bytes
    )
    handler = grpc.method_handlers_generic_handler("dsv4pd.v1.Decode", {"Generate": generate})
    server.add_generic_rpc_handlers((handler,))
    address = listen(server, "127.0.0.1", 0)
    await server.start()
    port_file.write_text(address)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    times_file.write_text(json.dumps({key: list(times) for key, times in worker.sent.items()}))
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])))
