"""Reading problems and answers, and what a score says."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from kimi_k3_npu.evaluation.answers import Reply
from kimi_k3_npu.evaluation.gsm import (
    EvaluationError,
    Marked,
    Problem,
    differing,
    final_number,
    mark,
    read_marked,
    read_problems,
    score,
    wilson,
    write_marked,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("The answer is 18.", "18"),
        ("She makes $18.50 every day.", "18.5"),
        ("In 7 days that is 1,234,567 eggs", "1234567"),
        ("between 3,4 and 5", "5"),
        ("It falls to -5", "-5"),
        ("It falls to \N{MINUS SIGN}5 degrees", "-5"),
        ("10-5", "5"),
        ("85-24=61", "61"),
        ("so \\boxed{42}, as 6 times 7", "42"),
        ("\\boxed{1} or rather \\boxed{$2,000}", "2000"),
        ("Half of 8 is 4\n#### 4\nI checked it 2 times", "4"),
        ("#### $1,000", "1000"),
        ("none", None),
        ("", None),
        ("####", None),
        ("3 of them\n#### none", None),
    ],
)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Decimal(number))


GSM8K = {
    "question": "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many altogether?",
    "answer": "She sold 48/2 = <<48/2=24>>24 clips in May.\nThat makes 48+24 = <<48+24=72>>72.\n#### 72",
}


def write(file: Path, *objects: object) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return file


def test_gsm8k_lines(tmp_path: Path) -> None:
    thousands = {"question": "How many?", "answer": "Many.\n#### 1,080"}
    file = write(tmp_path / "test.jsonl", GSM8K, thousands)
    file.write_text(file.read_text().replace("\n", "\n\n", 1))
    first, second = read_problems(file)
    assert (first.question, first.number) == (GSM8K["question"], 72)
    assert first.solution == "She sold 48/2 = 24 clips in May.\nThat makes 48+24 = 72."
    assert second.number == 1080


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON"),
        ('{"question": "a"}', "its answer is no text"),
        ('{"question": "a", "answer": "7"}', "answer has no #### with a number"),
        ('{"question": "a", "answer": "#### seven"}', "answer has no #### with a number"),
        ('{"question": " ", "answer": "#### 7"}', "its question is no text"),
        ("[1]", "it is not an object"),
        ('{"question": "a", "answer": 7}', "its answer is no text"),
    ],
)
def test_a_line_that_is_no_problem(tmp_path: Path, line: str, reason: str) -> None:
    file = write(tmp_path / "test.jsonl", GSM8K)
    with file.open("a") as lines:
        lines.write(line)
    with pytest.raises(EvaluationError, match=rf"test.jsonl:2: .*{reason}") as error:
        read_problems(file)
    assert '"question": "..."' in str(error.value)


def test_no_problems(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="holds no problems"):
        read_problems(write(tmp_path / "empty.jsonl"))


def test_a_solved_problem_as_an_example() -> None:
    problem = Problem("What is 1 plus 1?", "1+1=2.", Decimal(2))
    question, answer = problem.as_shot(thinking=True)
    assert question == {"role": "user", "content": "What is 1 plus 1?"}
    assert answer == {"role": "assistant", "reasoning_content": "1+1=2.", "content": "2"}
    assert problem.as_shot(thinking=False)[1] == {"role": "assistant", "content": "1+1=2.\n#### 2"}


def marks(*replies: Reply) -> list[Marked]:
    return [mark(Problem(f"problem {i}", "", Decimal(18)), reply) for i, reply in enumerate(replies)]


def test_a_score() -> None:
    marked = marks(
        Reply("18.00", "", 10, True),
        Reply("17", "it is 18", 20, True),
        Reply("I do not know", "18", 30, True),
        Reply("", "I am still thinking, 18", 40, False),
    )
    found = score(marked, seconds=5.0)
    assert [one.right for one in marked] == [True, False, False, False]
    assert (found.problems, found.right, found.accuracy) == (4, 1, 0.25)
    assert (found.invalid, found.cut_off) == (2, 1)
    assert (found.tokens, found.seconds, found.tokens_per_second) == (100, 5.0, 20.0)
    assert found.interval == wilson(1, 4)


@pytest.mark.parametrize(
    ("right", "total", "interval"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0000, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_confidence_intervals_as_published(right: int, total: int, interval: tuple[float, float]) -> None:
    assert wilson(right, total) == pytest.approx(interval, abs=6e-5)
    mirrored = wilson(total - right, total)
    assert mirrored == pytest.approx((1 - interval[1], 1 - interval[0]), abs=6e-5)


def test_answers_are_kept_and_compared(tmp_path: Path) -> None:
    first = marks(Reply("18", "a", 1, True), Reply("a \N{GREEK SMALL LETTER PI}", "", 1, True))
    second = marks(Reply("18", "thought otherwise", 2, True), Reply("17", "", 1, True))
    write_marked(first, tmp_path / "new" / "a.jsonl")
    assert read_marked(tmp_path / "new" / "a.jsonl") == first
    assert differing(first, second) == [(first[1], second[1])]
    with pytest.raises(EvaluationError, match="not answers to the same problems"):
        differing(first, second[::-1])
    with pytest.raises(EvaluationError, match="does not hold the answers"):
        read_marked(write(tmp_path / "other.jsonl", {"a": 1}))


def test_odd_files(tmp_path: Path) -> None:
    """Every bad line is named, a mark of the byte order is none, and any character of an answer comes back."""
    file = write(tmp_path / "test.jsonl", GSM8K)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b'", "', b'",\r"'))
    assert len(read_problems(file)) == 1
    file.write_bytes(file.read_bytes() + b"\xe9\n" + b"[" * 5000 + b"\n")
    with pytest.raises(EvaluationError) as error:
        read_problems(file)
    first, second = str(error.value).splitlines()
    assert first == f"{file}:2: no problem in GSM8K's format: not UTF-8: byte E9 in place 1"
    assert second.startswith(f"{file}:3: no problem in GSM8K's format: it is not JSON; a line is ")
    answers = marks(Reply("a\u2028b\x85c \ud83d", "", 1, True))
    write_marked(answers, tmp_path / "out.jsonl")
    assert read_marked(tmp_path / "out.jsonl") == answers
