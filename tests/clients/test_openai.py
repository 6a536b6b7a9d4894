"""OpenAI's own Python package."""

import json
import random
from pathlib import Path

import pytest

from common.evaluation.recall import make_question
from tests.clients.environments import client_environment, run_client
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1100)]
PROGRAM = Path(__file__).with_name("programs") / "openai_calls.py"


def test_every_kind_of_call_gives_typed_objects_and_typed_errors(cluster: Cluster, tmp_path: Path):
    bin_directory = client_environment("openai", ["openai==3.57.0"])
    question = make_question(random.Random(11), 600)
    output = run_client([bin_directory / "python", PROGRAM, cluster.url, question.prompt], tmp_path)
    found = json.loads(output)
    assert found["models"] == ["dsv4-nano"]
    assert found["text"] == found["streamed"] == found["chat_streamed"] == question.answer
    assert found["chat"] == [question.answer] * 2
    # Four digits and the newline that ended them.
    assert found["chat_tokens"] == question.answer + "\n"
    assert (found["usage"]["completion_tokens"], found["streamed_usage"]) == (5, 5)
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + 5 == len(question.prompt) + 5
    assert found["first_logprob"] is None
    assert {"chunk", "content.delta", "content.done"} <= set(found["chat_events"])
    assert found["request_id"] == "from-openai"
    assert found["bad"] == ["nonsense", "unknown_parameter", "invalid_request_error"]
    assert found["missing"] == "model_not_found"
