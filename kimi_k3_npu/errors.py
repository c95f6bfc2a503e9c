"""What a user can get wrong, as exceptions. The command line prints a `KimiK3Error`'s message without a traceback."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

#: How many names of one kind a message prints: a missing layer is 5,000 names. `CheckpointError.faults` has them all.
NAMES_SHOWN = 20


class KimiK3Error(ValueError):
    """Base of every mistake that the user can correct: it names the thing, what was found and what would be right."""


class ConfigError(KimiK3Error):
    """The model configuration contradicts itself, or is not a Kimi-K3 configuration."""


class LayoutError(KimiK3Error):
    """A parallel layout cannot work for this model or this number of devices."""


class IgnoredOptionError(LayoutError):
    """An option of a layout asks for something that nothing in the layout would do."""


class LaunchError(KimiK3Error):
    """A launch would fail or would silently do something else than asked."""


@dataclass(frozen=True)
class Fault:
    """One thing wrong with a checkpoint.

    Args:
        kind: What is wrong, the same words for every fault of this kind ("missing shard"); faults are grouped by it.
        name: The tensor or file that it is wrong with.
        detail: What was found and, where it is not obvious, what was wanted.
    """

    kind: str
    name: str
    detail: str


class CheckpointError(KimiK3Error):
    """A checkpoint is incomplete, damaged, or not the model's. `faults` holds every fault found, not only the first."""

    def __init__(self, message: str, faults: Iterable[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)

    @classmethod
    def from_faults(cls, folder: str | Path, faults: Iterable[Fault]) -> CheckpointError:
        """The error for all `faults` of the checkpoint in `folder`, grouped by kind in order of first occurrence."""
        faults = tuple(faults)
        kinds: dict[str, list[Fault]] = {}
        for fault in faults:
            kinds.setdefault(fault.kind, []).append(fault)
        lines = [f"{folder}: {len(faults)} fault{'s' * (len(faults) != 1)} in this checkpoint"]
        for kind, members in kinds.items():
            lines.append(f"  {kind} ({len(members)}):")
            lines += [f"    {fault.name}: {fault.detail}" for fault in members[:NAMES_SHOWN]]
            if len(members) > NAMES_SHOWN:
                lines.append(f"    ... and {len(members) - NAMES_SHOWN} more")
        return cls("\n".join(lines), faults)
