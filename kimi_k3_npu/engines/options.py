"""Options of engines that the model does not implement, or only some values of: a launch that gives them is refused.

Each engine's folder has them as a table. The adapter raises from it when the engine runs; since nothing in a table
needs the engine, a plan can report from it before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kimi_k3_npu.errors import LaunchError

NOT_IMPLEMENTED = "is not implemented by this model"


@dataclass(frozen=True)
class Option:
    """One option, or environment variable, of an engine.

    Args:
        name: As it is written on a command line.
        taken: The values that the model implements.
        at: Where the running engine keeps the value, in the adapter's own terms; empty where the adapter is handed it.
        why: What happens to any other value; it ends the sentence that begins with option and value.
        fix: What to do instead.
    """

    name: str
    taken: tuple[object, ...]
    at: str = ""
    why: str = NOT_IMPLEMENTED
    fix: str = "leave it out"

    def problem(self, value: object) -> str | None:
        """Why `value` is refused, None if it is taken."""
        if value in self.taken:
            return None
        return f"{self.name}{' ' if self.name.startswith('--') else '='}{value} {self.why}"

    def check(self, value: object) -> None:
        """Raise LaunchError if `value` is refused."""
        if problem := self.problem(value):
            raise LaunchError(f"{problem}; {self.fix}")


def choice(name: str, taken: Iterable[str], at: str = "", why: str = NOT_IMPLEMENTED) -> Option:
    """An option whose message tells the values that are taken."""
    names = tuple(taken)
    return Option(name, names, at, why, f"choices: {', '.join(names)}")


#: Our loader's, in any engine; the last reads nothing.
LOAD_FORMATS = ("auto", "safetensors", "dummy")
LOAD_FORMAT = choice(
    "--load-format",
    LOAD_FORMATS,
    why=f"{NOT_IMPLEMENTED}, which reads the slices that a rank needs from safetensors files",
)


def check_all(options: Iterable[Option], value_of: Callable[[Option], object]) -> None:
    """Raise LaunchError for the first of `options` whose value is refused."""
    for option in options:
        option.check(value_of(option))
