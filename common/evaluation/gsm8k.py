"""GSM8K in its usual five-shot form: worked examples, a question, and the number of the answer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

SHOTS = 5
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class GradeSchoolProblem:
    """`answer` is the whole worked answer, which ends with "#### number"."""

    question: str
    answer: str


def read_problems(path: Path) -> list[GradeSchoolProblem]:
    """One JSON object a line with `question` and `answer`. Raises ValueError that names the line."""
    found: list[GradeSchoolProblem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            problem = GradeSchoolProblem(str(item["question"]), str(item["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} line {number} is no problem with question and answer: {error!r}") from None
        if final_number(problem.answer) is None:
            raise ValueError(f"{path} line {number}: the answer holds no number")
        found.append(problem)
    if len(found) <= SHOTS:
        raise ValueError(f"{path} holds {len(found)} problems; {SHOTS} are examples, so more are needed")
    return found


def prompt_for(examples: list[GradeSchoolProblem], problem: GradeSchoolProblem) -> str:
    shots = "".join(f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in examples)
    return f"{shots}Question: {problem.question}\nAnswer:"


def final_number(text: str) -> Decimal | None:
    """The number behind the last "####", else the last number in the text."""
    marked = text.rpartition("####")[2] if "####" in text else text
    numbers = _NUMBER.findall(marked)
    if not numbers:
        return None
    chosen = numbers[0] if "####" in text else numbers[-1]
    try:
        return Decimal(chosen.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None
