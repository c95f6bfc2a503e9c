"""The problems that the tiny checkpoint is trained and tested on: repeatable, true, and never the same twice over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_npu.evaluation.gsm import read_problems
from kimi_k3_npu.resources import resource_path
from weights.tiny.problems import BEGINNINGS, EVENTS, ONE_STEP, Problem, distinct, problems, work

ROOT = Path(__file__).parents[2]
SHIPPED = resource_path("weights", "tiny", "test.jsonl")


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return list(islice(problems("train", 0), 20_000))


@pytest.fixture(scope="module")
def test() -> list[Problem]:
    return distinct("test", 0, 2_000)


def test_a_seed_decides(train: list[Problem]) -> None:
    assert list(islice(problems("train", 0), 500)) == train[:500]
    assert list(islice(problems("train", 1), 500)) != train[:500]
    assert len({problem.question for problem in train}) > 17_000


def single_product(problem: Problem) -> bool:
    return re.fullmatch(r"\d\*\d", problem.expression) is not None


def test_train_and_test_are_disjoint(train: list[Problem], test: list[Problem]) -> None:
    assert not {problem.question for problem in train} & {problem.question for problem in test}
    asked = [{problem.expression for problem in part if not single_product(problem)} for part in (train, test)]
    assert not asked[0] & asked[1]
    assert {problem.expression for problem in test if single_product(problem)} <= {p.expression for p in train}


def test_everything_is_asked_in_every_wording(train: list[Problem], test: list[Problem]) -> None:
    for part in (train, test):
        text = "\n".join(problem.question for problem in part)
        wordings = [wording for table in (ONE_STEP, BEGINNINGS, EVENTS) for some in table.values() for wording in some]
        for wording in wordings:
            assert re.search(re.sub(r"\\{\w\\}", r"\\w+", re.escape(wording)), text), wording


def test_what_is_said_is_true(train: list[Problem], test: list[Problem]) -> None:
    """Python's own arithmetic on the expression, and on both sides of every equation of the steps."""
    for problem in (*train, *test):
        assert eval(problem.expression) == problem.answer
        equations = re.findall(r"([\d+*-]+)=(\d+)", problem.steps)
        assert equations
        for left, right in equations:
            assert eval(left) == int(right), problem
        sums = re.findall(r"(\d+)[+-](\d+):", problem.steps)
        assert all(int(number) <= 99 for pair in sums for number in pair)
        assert int(re.findall(r"\d+", problem.steps)[-1]) == problem.answer
        asked = sorted(int(number) for number in re.findall(r"\d+", problem.question))
        assert asked == sorted(int(number) for number in re.findall(r"\d+", problem.expression))
        assert asked[-1] <= 99


@given(st.integers(0, 99), st.integers(0, 99))
def test_the_digits_of_the_steps_make_the_result(a: int, b: int) -> None:
    for sign in ("+", "-")[: 1 + (a >= b)]:
        steps, result = work(sign, a, b)
        ones, tens = (int(right) for right in re.findall(r"=(\d+)", steps))
        assert 10 * tens + ones % 10 == result == (a + b if sign == "+" else a - b)


def test_the_shipped_problems_are_drawn_so() -> None:
    command = [sys.executable, "-m", "weights.tiny.problems", "test", "--count", "500", "--seed", "1"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed == SHIPPED.read_text()
    assert [problem.number for problem in read_problems(SHIPPED)] == [p.answer for p in distinct("test", 1, 500)]
    assert len({json.loads(line)["question"] for line in printed.splitlines()}) == 500
