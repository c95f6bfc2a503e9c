"""The options of an engine's own command line, as lists that were taken from its parser (recipes/flags/*.txt)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kimi_k3_npu.recipes.schema import RecipeError
from kimi_k3_npu.resources import resource_path

Takes = Literal["switch", "value", "values"]


@dataclass(frozen=True)
class EngineFlags:
    """The options of one release, and the environment variables that occur in its sources."""

    name: str
    source: str
    options: Mapping[str, tuple[Takes, tuple[str, ...]]]
    variables: frozenset[str]

    def __contains__(self, flag: str) -> bool:
        return flag in self.options

    @property
    def names(self) -> list[str]:
        return list(self.options)

    def takes(self, flag: str) -> Takes:
        """What follows a flag; "value" for one that is not known."""
        return self.options[flag][0] if flag in self.options else "value"

    def choices(self, flag: str) -> tuple[str, ...]:
        """The values that the parser allows; empty when it leaves that open."""
        return self.options[flag][1] if flag in self.options else ()


@functools.cache
def load_flags(name: str) -> EngineFlags:
    """The list recipes/flags/`name`.txt. Raises RecipeError if there is none."""
    file = resource_path("recipes", "flags", f"{name}.txt")
    if not file.is_file():
        raise RecipeError(
            f"no flag list {name}; there are: {', '.join(sorted(p.stem for p in file.parent.glob('*.txt')))}"
        )
    comment, *lines = file.read_text(encoding="utf-8").splitlines()
    options: dict[str, tuple[Takes, tuple[str, ...]]] = {}
    variables = set()
    for line in lines:
        first, _, rest = line.partition(" ")
        if first == "env":
            variables.add(rest)
            continue
        takes, _, choices = rest.partition(" ")
        options[first] = (_takes(takes), tuple(choices.split(",")) if choices else ())
    return EngineFlags(name, comment.removeprefix("# "), options, frozenset(variables))


def _takes(word: str) -> Takes:
    return "switch" if word == "switch" else "values" if word == "values" else "value"
