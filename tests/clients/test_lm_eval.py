"""lm-eval's local-completions: log-likelihoods of echoed token lists, and text up to a stop string."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from common.evaluation.recall import make_question
from tests.clients.environments import client_environment, run_client
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.system, pytest.mark.timeout(1100)]
QUESTIONS = 4


def write_tasks(folder: Path) -> None:
    """`choice` ranks the right answer among wrong ones, `written` writes it."""
    rng = random.Random(5)
    data = folder / "recall.jsonl"
    with data.open("w", encoding="utf-8") as lines:
        for _ in range(QUESTIONS):
            question = make_question(rng, 500)
            wrong = [f"{rng.randrange(10_000):04d}" for _ in range(2)]
            document = {"prompt": question.prompt, "choices": [question.answer, *wrong], "answer": question.answer}
            lines.write(json.dumps(document) + "\n")
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    choice = {
        "task": "choice", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    written = {
        "task": "written", "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    for task in (choice, written):
        # JSON is YAML too.
        (folder / f"{task['task']}.yaml").write_text(json.dumps(common | task), encoding="utf-8")


@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_right_answer_is_the_likeliest_and_is_written(cluster: Cluster, tmp_path: Path, batch_size: int):
    bin_directory = client_environment("lm-eval", ["lm-eval[api]==0.4.13"])
    write_tasks(tmp_path)
    model = f"model=dsv4-nano,base_url={cluster.url}/v1/completions,tokenizer_backend=remote,num_concurrent=2"
    run_client(
        [
            bin_directory / "lm-eval", "run", "--model", "local-completions", "--model_args", f"{model},max_retries=1",
            "--include_path", tmp_path, "--tasks", "choice,written", "--batch_size", str(batch_size),
            "--output_path", tmp_path / "out",
        ],
        tmp_path,
    )  # fmt: skip
    (results,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(results.read_text(encoding="utf-8"))["results"]
    assert found["choice"]["acc,none"] == 1.0
    assert found["written"]["exact_match,none"] == 1.0
