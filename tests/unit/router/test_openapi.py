"""schemathesis reads the router's OpenAPI document, makes bodies that fit it and bodies that don't, and finds nothing."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack

import httpx
import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.unit.router.conftest import serving
from tests.unit.router.scripted_worker import ScriptedWorker


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A router in a thread of its own, over a worker that answers at once."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stack = AsyncExitStack()

    async def start() -> str:
        workers = [await ScriptedWorker().start(), await ScriptedWorker().start()]
        for worker in workers:
            stack.push_async_callback(worker.stop)
        return (await stack.enter_async_context(serving(workers[:1], workers[1:]))).url

    yield asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@pytest.fixture(scope="module")
def api(url: str) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


OPERATIONS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/tokenizer_info"), ("GET", "/server_info"),
    ("GET", "/version"), ("GET", "/health"), ("GET", "/ready"),
]  # fmt: skip
# A schema can't say that a token id is below the vocabulary's size, that a prompt fits the context, or which parameters
# exclude each other: such a body is 400 by name, which tests of their own hold.
LEFT_OUT = [positive_data_acceptance]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_whatever_is_sent_the_answer_is_a_documented_one(
    api: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
):
    if method == "GET" and mode is GenerationMode.NEGATIVE:
        pytest.skip("these have no parameter that could be wrong")

    @hypothesis.settings(
        max_examples=60, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(api[path][method].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(excluded_checks=LEFT_OUT, timeout=20)

    check()


def test_the_document_names_every_endpoint(url: str):
    assert set(httpx.get(f"{url}/openapi.json").json()["paths"]) == {path for _, path in OPERATIONS}
