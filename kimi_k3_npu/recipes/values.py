"""Values of flags and variables as an engine's parser takes them: their types, and the ranges of what they can mean."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import yaml

from kimi_k3_npu.recipes.addresses import MOST_PORT, read_address, read_endpoint
from kimi_k3_npu.resources import resource_path

_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{c}i": 2 ** (10 * (i + 1)) for i, c in enumerate("KMGT")
}
_SIZE = re.compile(r"(\d+)(Ki|Mi|Gi|Ti)|(\d+(?:\.\d+)?)([kMGT])")
_RULE = re.compile(r"(?P<kind>[a-z]*) ?(?:(?P<open>[\[(])(?P<low>[^,]*), ?(?P<high>[^\])]*)(?P<close>[\])]))?")
#: As Linux names them.
_INTERFACE = re.compile(r"(?!\.{1,2}$|-)[^\s/:]{1,15}")
_INPUT_KINDS = (
    (re.compile(r"(\w+_)?addr(_\d+)?"), "address"),
    (re.compile(r"(\w+_)?port"), "port"),
    (re.compile(r"interface"), "interface"),
)
#: Digits of a number that is read at all: Python itself refuses thousands, and no flag has a use for them.
_MOST_DIGITS = 300


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; either may be None, or left out itself."""

    low: float | None
    high: float | None
    without_low: bool
    without_high: bool

    def __contains__(self, number: float) -> bool:
        above = self.low is None or (number > self.low if self.without_low else number >= self.low)
        return above and (self.high is None or (number < self.high if self.without_high else number <= self.high))

    def __str__(self) -> str:
        low = None if self.low is None else f"{'above' if self.without_low else 'at least'} {self.low:g}"
        high = None if self.high is None else f"{'below' if self.without_high else 'at most'} {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


@dataclass(frozen=True)
class Rule:
    """What one value may be: a kind of `KINDS`, and a range for numbers."""

    kind: str
    range: Range | None = None

    def read(self, value: Any) -> Any:
        """The value converted. Raises ValueError, whose message says what is allowed."""
        return KINDS[self.kind].read(value, self)

    @property
    def allowed(self) -> str:
        return f"{KINDS[self.kind].name}{f' {self.range}' if self.range else ''}"

    def number(self, value: Any, convert: Callable[[str], float]) -> float:
        try:
            if len(text := str(value).strip()) > _MOST_DIGITS:
                raise ValueError
            found = convert(text)
        except (ValueError, ArithmeticError):
            raise ValueError(f"must be {self.allowed}") from None
        if not math.isfinite(found) or (self.range and found not in self.range):
            raise ValueError(f"must be {self.allowed}")
        return found


TEXT = Rule("text")


@dataclass(frozen=True)
class Kind:
    """One way of writing values: what people call it, and how it is read."""

    name: str
    read: Callable[[Any, Rule], Any]


def _size(text: str) -> int:
    """An integer, or one with a suffix of thousands (k, M, G, T) or of 1024s (Ki, Mi, Gi, Ti)."""
    match = _SIZE.fullmatch(text)
    if not match:
        return int(text)
    whole, binary, decimal, suffix = match.groups()
    return int(whole) * _SUFFIXES[binary] if binary else int(Decimal(decimal) * _SUFFIXES[suffix])


def _json(value: Any, rule: Rule) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"must be {rule.allowed}") from None


def _object(value: Any, rule: Rule) -> Any:
    found = _json(value, rule)
    if not isinstance(found, dict):
        raise ValueError(f"must be {rule.allowed}")
    return found


def _objects(value: Any, rule: Rule) -> Any:
    found = _json(value, rule)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"must be {rule.allowed}")
    return found


def _ints(value: Any, rule: Rule) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"must be {rule.allowed}")
    return [rule.number(item, int) for item in value]


def _text(value: Any, rule: Rule) -> Any:
    if isinstance(value, str) and value[:1] == "-" and len(value) > 1:
        raise ValueError("must not begin with -: the engine would take it for a flag")
    return value


def _word(value: Any, rule: Rule) -> Any:
    if not isinstance(value, str):
        raise ValueError(f"must be {rule.allowed}")
    return value


def _interface(value: Any, _: Rule) -> Any:
    if not _INTERFACE.fullmatch(str(value)):
        raise ValueError("must be the name of one network interface, such as eth0")
    return value


KINDS: dict[str, Kind] = {
    "text": Kind("text", _text),
    "word": Kind("text", _word),
    "int": Kind("a whole number", lambda value, rule: rule.number(value, int)),
    "size": Kind("a whole number, or one such as 128k or 128Ki,", lambda value, rule: rule.number(value, _size)),
    "float": Kind("a number", lambda value, rule: rule.number(value, float)),
    "json": Kind("JSON", _json),
    "object": Kind("a JSON object", _object),
    "objects": Kind("a list of JSON objects", _objects),
    "ints": Kind("a list of whole numbers, each", _ints),
    "address": Kind("an IP address or a host name", lambda value, _: read_address(str(value))),
    "interface": Kind("a network interface", _interface),
    "endpoint": Kind("ADDRESS:PORT", lambda value, _: read_endpoint(str(value))),
}


def input_rule(name: str) -> Rule:
    """What an input of a recipe may be, which its name says."""
    kind = next((kind for pattern, kind in _INPUT_KINDS if pattern.fullmatch(name)), "text")
    return Rule("int", Range(1, MOST_PORT, False, False)) if kind == "port" else Rule(kind)


@functools.cache
def stated_rules(owner: str) -> Mapping[str, tuple[str | None, Range | None]]:
    """By flag or variable, what recipes/flags/values.yaml says: the kind (None: as in the list of flags) and the range.

    Args:
        owner: An engine, or "variables".
    """
    text = resource_path("recipes", "flags", "values.yaml").read_text(encoding="utf-8")
    return {name: _stated(rule) for name, rule in yaml.safe_load(text)[owner].items()}


def _stated(text: str) -> tuple[str | None, Range | None]:
    match = _RULE.fullmatch(text)
    assert match, text
    low, high = ((float(end) if (end or "").strip() else None) for end in match.group("low", "high"))
    found = Range(low, high, match["open"] == "(", match["close"] == ")") if match["open"] else None
    return match["kind"] or None, found


def faults(name: str, value: Any, rules: Mapping[str, Rule]) -> Iterator[str]:
    """What is wrong with the value of `name`, and with what `rules` names inside it ("NAME.KEY")."""
    if name in rules:
        try:
            value = rules[name].read(value)
        except ValueError as error:
            yield f"{name} is {_short(value)}: {error}"
            return
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict):
            for key, item in part.items():
                yield from faults(f"{name}.{key}", item, rules)


def _short(value: Any, most: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text if len(text) <= most else text[:most] + "...")
