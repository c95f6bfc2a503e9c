"""Say what is in a checkpoint folder, from its headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kimi_k3_npu.checkpoint.names import template_of
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.verify import examine
from kimi_k3_npu.errors import CheckpointError, Fault


@dataclass(frozen=True)
class Pattern:
    """Tensors whose names differ in layer, expert or block only: how many of each dtype and shape."""

    name: str
    tensors: int
    bytes: int
    kinds: dict[str, int]


@dataclass(frozen=True)
class Inspection:
    """The weights of a folder.

    Args:
        storage: How they are stored; None when the folder contradicts itself.
        experts: The form of the routed experts.
        dtypes: Bytes by dtype.
        faults, notes: What keeps it from loading, and what is unusual but harmless, as far as headers show it.
    """

    storage: str | None
    experts: str | None
    tensors: int
    shards: int
    bytes: int
    dtypes: dict[str, int]
    patterns: list[Pattern]
    faults: list[Fault]
    notes: list[Fault]


def inspect(folder: str | Path) -> Inspection:
    """What is in `folder`. Raises CheckpointError when its files cannot be read at all."""
    found = examine(Path(folder))
    if found.checkpoint is None:
        raise CheckpointError.from_faults(folder, found.faults)
    entries = found.checkpoint.entries.values()
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[_dtype(entry.dtype)] += entry.nbytes
    return Inspection(
        storage=found.storage.name if found.storage else None,
        experts=found.storage.experts.title if found.storage else None,
        tensors=len(entries),
        shards=len({entry.file for entry in entries}),
        bytes=found.checkpoint.total_bytes,
        dtypes=dict(dtypes.most_common()),
        patterns=_patterns(found.checkpoint),
        faults=found.faults,
        notes=found.notes,
    )


def _patterns(checkpoint: Checkpoint) -> list[Pattern]:
    kinds: dict[str, Counter[str]] = {}
    sizes: Counter[str] = Counter()
    for entry in checkpoint.entries.values():
        name = template_of(entry.name)
        kinds.setdefault(name, Counter())[f"{_dtype(entry.dtype)} {list(entry.shape)}"] += 1
        sizes[name] += entry.nbytes
    return [Pattern(name, found.total(), sizes[name], dict(found.most_common())) for name, found in kinds.items()]


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
