"""Word problems in GSM8K's format, scored by the final number of the answer.

A line of the data is a JSON object with a `question` and an `answer`, whose last line is `#### ` and the number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path

from kimi_k3_npu.chat.calls import Message
from kimi_k3_npu.errors import NAMES_SHOWN, KimiK3Error
from kimi_k3_npu.evaluation.answers import Reply
from kimi_k3_npu.lines import BadLine, json_line, read_file, read_object

MARK = "####"

#: A hyphen after a digit subtracts; any other that touches a number is its sign.
_NUMBER = re.compile(r"(?:(?<!\d)-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
#: GSM8K's solutions hold what its authors' calculator filled in, as in 48/2 = <<48/2=24>>24.
_CALCULATOR = re.compile(r"<<[^<>]*>>")


class EvaluationError(KimiK3Error):
    """The problems, or the answers to compare, cannot be used."""


@dataclass(frozen=True)
class Problem:
    """A question, the worked solution without its last line, and the number that is right."""

    question: str
    solution: str
    number: Decimal

    def as_shot(self, thinking: bool) -> list[Message]:
        """The problem as an example: the messages of who asks, and of a model that answers well."""
        answer = {"role": "assistant", "content": f"{self.solution}\n{MARK} {self.number}"}
        if thinking:
            answer |= {"reasoning_content": self.solution, "content": str(self.number)}
        return [{"role": "user", "content": self.question}, answer]


def read_problems(path: Path) -> list[Problem]:
    """The problems of a file.

    Raises:
        EvaluationError: Lines are no problems (a score of the others could not be compared), or there is none.
    """
    problems: list[Problem] = []
    bad: list[BadLine] = []
    for line in read_file(path):
        if isinstance(line, BadLine):
            bad.append(line)
        elif line.text.strip():
            try:
                problems.append(_problem(line.text))
            except ValueError as error:
                bad.append(BadLine(line.line, str(error)))
    if bad:
        lines = [f"{path}:{one.line}: no problem in GSM8K's format: {one.reason}" for one in bad[:NAMES_SHOWN]]
        more = [f"and {len(bad) - NAMES_SHOWN} more lines"] * (len(bad) > NAMES_SHOWN)
        wanted = f'a line is {{"question": "...", "answer": "... {MARK} 42"}}'
        raise EvaluationError("\n".join([*lines, *more]) + f"; {wanted}")
    if not problems:
        raise EvaluationError(f"{path}: holds no problems")
    return problems


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends with: what follows the last `####`, what the last \\boxed{} holds, or else the
    last number of the text. Thousands may have commas, and dollars their sign."""
    text = text.replace("\N{MINUS SIGN}", "-")
    boxed = _BOXED.findall(text)
    if MARK in text:
        found = _NUMBER.findall(text.rpartition(MARK)[2])[:1]
    elif boxed:
        found = _NUMBER.findall(boxed[-1])[:1]
    else:
        found = _NUMBER.findall(text)[-1:]
    return Decimal(found[0].replace(",", "").replace("$", "")) if found else None


@dataclass(frozen=True)
class Marked:
    """One answer and what it was worth. `number` is what was read from it, None if there was nothing to read."""

    question: str
    expected: str
    thinking: str
    answer: str
    number: str | None
    right: bool
    tokens: int
    finished: bool


def mark(problem: Problem, reply: Reply) -> Marked:
    """Right is an answer whose final number is that of the problem, 18.00 being 18."""
    number = final_number(reply.content)
    return Marked(
        question=problem.question,
        expected=str(problem.number),
        thinking=reply.reasoning,
        answer=reply.content,
        number=None if number is None else str(number),
        right=number == problem.number,
        tokens=reply.tokens,
        finished=reply.finished,
    )


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of `problems` answers, how many were right, held no number (`invalid`), and were cut off before their end.

    accuracy and its 95 % confidence interval are parts of 1; tokens are generated ones, `seconds` from the first
    question to the last answer.
    """

    problems: int
    right: int
    accuracy: float
    interval: tuple[float, float]
    invalid: int
    cut_off: int
    seconds: float
    tokens: int
    tokens_per_second: float


def score(marked: Sequence[Marked], seconds: float) -> Score:
    """The score of at least one answer."""
    right, tokens = sum(one.right for one in marked), sum(one.tokens for one in marked)
    return Score(
        problems=len(marked),
        right=right,
        accuracy=right / len(marked),
        interval=wilson(right, len(marked)),
        invalid=sum(one.number is None for one in marked),
        cut_off=sum(not one.finished for one in marked),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
    )


def wilson(right: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """The score interval of E. B. Wilson (1927) for a probability of which `right` of `total` trials succeeded; z is
    1.96 for 95 %. Unlike the usual one it says something when all are right, or none."""
    share, weight = right / total, z * z / total
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(weight * share * (1 - share) + weight * weight / 4) / (1 + weight)
    return max(0.0, middle - half), min(1.0, middle + half)


def write_marked(marked: Sequence[Marked], path: Path) -> None:
    """A line of JSON each, in the order of the problems."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json_line(asdict(one)) for one in marked))


def read_marked(path: Path) -> list[Marked]:
    """What `write_marked` wrote. Raises EvaluationError for anything else."""
    marked = []
    for line in read_file(path):
        try:
            if isinstance(line, BadLine):
                raise ValueError(line.reason)
            marked.append(Marked(**read_object(line.text)))
        except (ValueError, TypeError):
            raise EvaluationError(
                f"{path}: does not hold the answers of an evaluation, as --out writes them: line {line.line} is none"
            ) from None
    return marked


def differing(first: Sequence[Marked], second: Sequence[Marked]) -> list[tuple[Marked, Marked]]:
    """Where two evaluations of the same problems answered differently, word for word; how they thought does not count.

    Raises:
        EvaluationError: They are not of the same problems.
    """
    if [one.question for one in first] != [one.question for one in second]:
        raise EvaluationError(
            f"the two are not answers to the same problems: {len(first)} and {len(second)} questions, in this order"
        )
    return [pair for pair in zip(first, second, strict=True) if pair[0].answer != pair[1].answer]


def _problem(line: str) -> Problem:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(raw, dict):
        raise ValueError("it is not an object")
    for key in ("question", "answer"):
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise ValueError(f"its {key} is no text")
    solution, marked, number = raw["answer"].rpartition(MARK)
    value = final_number(number)
    if not marked or value is None:
        raise ValueError(f"its answer has no {MARK} with a number behind it")
    return Problem(raw["question"], _CALCULATOR.sub("", solution).strip(), value)
