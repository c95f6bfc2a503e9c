"""The options of an engine's own command line, as lists that were taken from its parser (recipes/flags/*.txt)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from kimi_k3_npu.recipes.schema import RecipeError
from kimi_k3_npu.recipes.values import TEXT, Rule, faults, stated_rules
from kimi_k3_npu.resources import resource_path

Takes = Literal["switch", "value", "values"]


@dataclass(frozen=True)
class Option:
    """What follows a flag: how many values, what each may be, and the only ones where the parser names them."""

    takes: Takes = "value"
    rule: Rule = TEXT
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineFlags:
    """The options of one release, and the environment variables that occur in its sources."""

    name: str
    source: str
    options: Mapping[str, Option]
    #: Other names of options.
    aliases: Mapping[str, str]
    #: Rules for what is inside of JSON values, by FLAG.KEY.
    inside: Mapping[str, Rule]
    variables: frozenset[str]

    def __contains__(self, flag: str) -> bool:
        return flag in self.options or flag in self.aliases

    @property
    def names(self) -> list[str]:
        return [*self.options, *self.aliases]

    def canonical(self, flag: str) -> str:
        """The name that recipes and checks use."""
        return self.aliases.get(flag, flag)

    def option(self, flag: str) -> Option:
        """What follows a flag; any text for one that is not known."""
        return self.options.get(self.canonical(flag), Option())

    def takes(self, flag: str) -> Takes:
        return self.option(flag).takes

    def choices(self, flag: str) -> tuple[str, ...]:
        """The values that the parser allows; empty when it leaves that open."""
        return self.option(flag).choices

    def read(self, flag: str, value: Any) -> Any:
        """The value of a flag as the parser converts it. Raises ValueError for what `faults` finds."""
        rule = self.option(flag).rule
        return [rule.read(item) for item in value] if isinstance(value, list) else rule.read(value)

    def faults(self, flag: str, value: Any) -> Iterator[str]:
        """What the parser, or the meaning of a number, has against the value of a flag that takes one."""
        option = self.option(flag)
        items = value if option.takes == "values" and isinstance(value, list) else [value]
        if not items:
            yield f"{flag} needs a value"
        for item in items:
            if not option.choices:
                yield from faults(flag, item, {flag: option.rule, **self.inside})
            elif str(item) not in option.choices:
                yield f"{flag} {item} is not a choice; choices: {', '.join(option.choices)}"


@functools.cache
def load_flags(name: str) -> EngineFlags:
    """The list recipes/flags/`name`.txt. Raises RecipeError if there is none."""
    file = resource_path("recipes", "flags", f"{name}.txt")
    if not file.is_file():
        raise RecipeError(
            f"no flag list {name}; there are: {', '.join(sorted(p.stem for p in file.parent.glob('*.txt')))}"
        )
    comment, *lines = file.read_text(encoding="utf-8").splitlines()
    stated = stated_rules(name.partition("-")[0])
    options: dict[str, Option] = {}
    aliases: dict[str, str] = {}
    variables = set()
    for line in lines:
        first, second, *rest = line.split(" ", 2)
        if first == "env":
            variables.add(second)
        elif second == "alias":
            aliases[first] = rest[0]
        else:
            takes, _, listed = second.partition(":")
            kind, range_ = stated.get(first, (None, None))
            rule = Rule(kind or listed or "text", range_)
            options[first] = Option(cast("Takes", takes), rule, tuple(rest[0].split(",")) if rest else ())
    inside = {key: Rule(kind or "text", range_) for key, (kind, range_) in stated.items() if "." in key}
    return EngineFlags(name, comment.removeprefix("# "), options, aliases, inside, frozenset(variables))
