"""Arithmetic word problems with worked steps, drawn from a seed: what the tiny checkpoint is trained and tested on.

Sums and differences of numbers to 99, products of single digits, and two of these after another. Digits are worked on
one pair at a time, with the carry written out. `python weights/tiny/problems.py test --count 500 --seed 1` prints
problems in GSM8K's format, a line of JSON each.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

#: One problem of this many is kept out of training.
HELD_OUT = 8
#: No number that is added to or taken from is larger.
LARGEST = 99

NAMES = (
    *("Ada", "Ben", "Cho", "Dev", "Eva", "Gus", "Ida", "Jin", "Kim", "Leo"),
    *("Mia", "Noa", "Oli", "Pia", "Raj", "Sam", "Tao", "Uma", "Vic", "Zoe"),
)
THINGS = (
    *("apples", "beads", "books", "buns", "cards", "coins", "cups", "eggs"),
    *("keys", "maps", "nuts", "pens", "plums", "shells", "stamps", "toys"),
)

#: One step, by its sign. x and y are people, t is what is counted.
ONE_STEP = {
    "+": (
        "{x} has {a} {t} and gets {b} more. How many {t} does {x} have?",
        "There are {a} {t} in a box and {b} in a bag. How many in all?",
        "{x} has {a} {t}, {y} has {b}. How many do they have together?",
        "{x} found {a} {t} today and {b} yesterday. How many is that?",
        "{a} {t} are on a table. {y} adds {b}. How many are there now?",
        "What is {a} plus {b}?",
    ),
    "-": (
        "{x} has {a} {t} and gives {b} to {y}. How many are left?",
        "There were {a} {t}. {x} took {b}. How many remain?",
        "{x} has {a} {t}, {y} has {b}. How many more does {x} have?",
        "Of {a} {t}, {b} are lost. How many are left?",
        "{x} had {a} {t} and sold {b}. How many does {x} still have?",
        "What is {a} minus {b}?",
    ),
    "*": (
        "{x} has {a} bags with {b} {t} in each. How many {t} are there?",
        "{a} boxes hold {b} {t} each. How many {t} is that?",
        "{x} buys {a} packs of {b} {t}. How many {t} are there?",
        "Each of {a} children has {b} {t}. How many in all?",
        "What is {a} times {b}?",
    ),
}
#: Two steps: how it begins, what happens, and the question.
BEGINNINGS = {
    "+": (
        "{x} has {a} {t} and gets {b} more.",
        "{x} finds {a} {t}, then {b} more.",
        "A shop has {a} {t} and buys {b}.",
    ),
    "-": ("{x} has {a} {t} and loses {b}.", "There were {a} {t}. {x} took {b}.", "A shop has {a} {t} and sells {b}."),
    "*": ("{x} has {a} bags of {b} {t}.", "There are {a} boxes with {b} {t} each.", "{x} buys {a} packs of {b} {t}."),
}
EVENTS = {
    "+": ("{y} brings {c} more.", "Then {c} are added.", "{y} adds {c}."),
    "-": ("{y} takes {c}.", "Then {c} are lost.", "{y} borrows {c}."),
}
QUESTIONS = ("How many are there now?", "How many {t} is that?", "How many {t} are there in the end?")


@dataclass(frozen=True)
class Problem:
    """`steps` work out the `answer`; `expression` is what is asked without words, such as 6*7-21."""

    question: str
    steps: str
    answer: int
    expression: str

    @property
    def split(self) -> Split:
        """Kept out of training is an expression in every wording; of single digits' products, which are too few and
        have to be known by heart, a wording."""
        key = self.question if self.expression[1:2] == "*" and len(self.expression) == 3 else self.expression
        return "train" if zlib.crc32(key.encode()) % HELD_OUT else "test"

    def as_gsm8k(self) -> dict[str, str]:
        """The problem in GSM8K's format: the steps, and the number after four hash signs."""
        return {"question": self.question, "answer": f"{self.steps}\n#### {self.answer}"}


def problems(split: Split, seed: int | str) -> Iterator[Problem]:
    """Endless problems of one split, the same for the same seed. Some come again."""
    rng = random.Random(f"{split} {seed}")
    while True:
        problem = _two_steps(rng) if rng.random() < 0.5 else _one_step(rng)
        if problem.split == split:
            yield problem


def distinct(split: Split, seed: int | str, count: int) -> list[Problem]:
    """The first `count` different problems."""
    found: dict[str, Problem] = {}
    for problem in problems(split, seed):
        found.setdefault(problem.question, problem)
        if len(found) == count:
            break
    return list(found.values())


def work(sign: str, a: int, b: int) -> tuple[str, int]:
    """The steps of a sign b, and the result.

    >>> work("+", 47, 38)
    ('47+38: 7+8=15, 4+3+1=8, so 85.', 85)
    >>> work("-", 81, 45)
    ('81-45: 11-5=6, 8-1-4=3, so 36.', 36)
    """
    if sign == "*":
        return f"{a}*{b}={a * b}.", a * b
    (tens_a, ones_a), (tens_b, ones_b) = divmod(a, 10), divmod(b, 10)
    if sign == "+":
        ones, result = ones_a + ones_b, a + b
        carry = "+1" if ones > 9 else ""
        steps = f"{ones_a}+{ones_b}={ones}, {tens_a}+{tens_b}{carry}={result // 10}"
    else:
        borrow, result = ones_a < ones_b, a - b
        ones_a += 10 * borrow
        steps = f"{ones_a}-{ones_b}={ones_a - ones_b}, {tens_a}{'-1' * borrow}-{tens_b}={result // 10}"
    return f"{a}{sign}{b}: {steps}, so {result}.", result


def _one_step(rng: random.Random) -> Problem:
    sign = rng.choice("++--*")
    a, b = _numbers(rng, sign)
    steps, answer = work(sign, a, b)
    return Problem(_worded(rng, rng.choice(ONE_STEP[sign]), a=a, b=b), steps, answer, f"{a}{sign}{b}")


def _two_steps(rng: random.Random) -> Problem:
    first, second = rng.choice("+-*"), rng.choice("+-")
    a, b = _numbers(rng, first)
    while first == "+" and a + b > LARGEST:
        a, b = _numbers(rng, first)
    steps, between = work(first, a, b)
    c = rng.randint(1, LARGEST if second == "+" else between)
    more, answer = work(second, between, c)
    wording = " ".join((rng.choice(BEGINNINGS[first]), rng.choice(EVENTS[second]), rng.choice(QUESTIONS)))
    question = _worded(rng, wording, a=a, b=b, c=c)
    return Problem(question, f"{steps} {more}", answer, f"{a}{first}{b}{second}{c}")


def _numbers(rng: random.Random, sign: str) -> tuple[int, int]:
    if sign == "*":
        return rng.randint(2, 9), rng.randint(2, 9)
    if sign == "+":
        return rng.randint(2, LARGEST), rng.randint(1, LARGEST)
    b, a = sorted(rng.sample(range(1, LARGEST + 1), 2))  # not 0 apart: what is left can lose something in a second step
    return a, b


def _worded(rng: random.Random, wording: str, **numbers: int) -> str:
    x, y = rng.sample(NAMES, 2)
    return wording.format(x=x, y=y, t=rng.choice(THINGS), **numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("split", choices=["train", "test"])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    for problem in distinct(args.split, args.seed, args.count):
        print(json.dumps(problem.as_gsm8k()))


if __name__ == "__main__":
    main()
