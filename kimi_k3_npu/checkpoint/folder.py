"""Which files of a folder are the checkpoint, and whether the index tells the truth about them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from kimi_k3_npu.checkpoint.safetensors_header import Header, load_json
from kimi_k3_npu.errors import CheckpointError, Fault
from kimi_k3_npu.locks import LOCK

#: How their names end.
SHARD, INDEX = ".safetensors", ".safetensors.index.json"

#: What counts as a shard in a folder without an index. Other safetensors files (adapters, test data) do not.
SHARD_PATTERNS = ("model.safetensors", "model-*.safetensors", "quant_model_weights*.safetensors")

#: What operating and file systems put beside files, AppleDouble's `._model.safetensors` among them; and our locks.
_LITTER = re.compile(
    r"\._.*|\.DS_Store|\.nfs.*|\.fuse_hidden.*|Thumbs\.db|desktop\.ini|lost\+found|.*" + re.escape(LOCK), re.IGNORECASE
)

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")


@dataclass
class Shards:
    """The files of a checkpoint.

    Args:
        present: Names of the shards that are there, sorted.
        weight_map: The index: shard name by tensor name. None without an index.
        metadata: The index's own metadata by its file name.
        unindexed: Names of *.safetensors files in the folder that are not shards, sorted.
        faults: What is wrong so far.
    """

    present: list[str] = field(default_factory=list)
    weight_map: dict[str, str] | None = None
    metadata: dict[str, dict[str, Any]] = field(default_factory=dict)
    unindexed: tuple[str, ...] = ()
    faults: list[Fault] = field(default_factory=list)


def contents(folder: Path) -> list[Path]:
    """What somebody has put into `folder`, by name: not what a system has added of itself, nor a lock of ours."""
    return sorted(path for path in folder.iterdir() if not _LITTER.fullmatch(path.name))


def has_weights(folder: Path) -> bool:
    """Whether `folder` holds shards or an index, be they right or not."""
    return folder.is_dir() and any(path.name.endswith((SHARD, INDEX)) for path in contents(folder))


def find_shards(folder: Path) -> Shards:
    """The shards in `folder`, with all that is wrong about the index and the file names.

    Raises:
        CheckpointError: `folder` is not a folder, or holds no safetensors checkpoint.
    """
    if not folder.is_dir():
        problem = "not a folder" if folder.exists() else "no such folder"
        raise CheckpointError(f"{folder}: {problem}; give the folder that holds the safetensors files")
    names = [path.name for path in contents(folder)]
    files = [name for name in names if name.endswith(SHARD)]
    indexes = [name for name in names if name.endswith(INDEX)]
    shards = Shards()
    if len(indexes) > 1:
        detail = f"{len(indexes)} index files, {', '.join(indexes)}; keep the one of the checkpoint to load"
        shards.faults.append(Fault("ambiguous index", folder.name, detail))
        return shards
    if indexes:
        _read_index(folder, indexes[0], shards)
    else:
        _take_usual_names(folder, files, shards)
    named = set(shards.present) if shards.weight_map is None else set(shards.weight_map.values())
    shards.unindexed = tuple(name for name in files if name not in named)
    return shards


def match_index(shards: Shards, headers: dict[str, Header]) -> list[Fault]:
    """Where the index and the shard `headers` (by shard name) disagree; nothing without an index.

    A tensor is not missed in a shard that is itself at fault: that fault is the cause.
    """
    if shards.weight_map is None:
        return []
    holders: dict[str, list[str]] = {}
    for shard, header in headers.items():
        for entry in header.entries:
            holders.setdefault(entry.name, []).append(shard)
    faults = []
    for name, shard in shards.weight_map.items():
        found = holders.get(name, [])
        if shard not in headers or shard in found or headers[shard].faults:
            continue
        if found:
            faults.append(Fault("tensor in another shard", name, f"the index says {shard}, it is in {found[0]}"))
        else:
            faults.append(Fault("tensor not in its shard", name, f"the index says {shard}, no shard has it"))
    for name, found in holders.items():
        if name not in shards.weight_map:
            faults.append(Fault("tensor not in the index", name, f"in {found[0]}"))
    return faults


def _read_index(folder: Path, index: str, shards: Shards) -> None:
    try:
        fields = load_json(
            (folder / index).read_bytes(),
            lambda key: shards.faults.append(Fault("duplicate key", key, f"twice in {index}")),
        )
        weight_map, metadata = fields.get("weight_map"), fields.get("metadata") or {}
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("weight_map must be an object of shard names by tensor name")
        if not isinstance(metadata, dict):
            raise ValueError(f"metadata is {metadata!r:.200}, expected an object")
        if outside := [shard for shard in set(weight_map.values()) if not _is_inside(shard)]:
            raise ValueError(f"names files outside the folder: {', '.join(sorted(outside))}")
    except OSError as error:
        shards.faults.append(Fault("broken index", index, error.strerror or str(error)))
    except ValueError as error:
        shards.faults.append(Fault("broken index", index, str(error)))
    else:
        # One file may be written in several ways: x, ./x, folder/x and folder//x.
        plain = {shard: str(PurePosixPath(shard)) for shard in set(weight_map.values())}
        shards.weight_map = {name: plain[shard] for name, shard in weight_map.items()}
        shards.metadata = {index: metadata}
        for shard, count in sorted(Counter(shards.weight_map.values()).items()):
            if (folder / shard).exists():
                shards.present.append(shard)
            else:
                detail = f"{index} puts {count} tensor{'s' * (count != 1)} there, it is not in the folder"
                shards.faults.append(Fault("missing shard", shard, detail))


def _is_inside(shard: str) -> bool:
    path = PurePosixPath(shard)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _take_usual_names(folder: Path, files: list[str], shards: Shards) -> None:
    shards.present = [name for name in files if any(fnmatchcase(name, pattern) for pattern in SHARD_PATTERNS)]
    if not shards.present:
        wanted = f"a *.safetensors.index.json, or {', '.join(SHARD_PATTERNS)}"
        found = f"only {', '.join(files)}" if files else "no safetensors file"
        raise CheckpointError(f"{folder}: no safetensors checkpoint: expected {wanted}; found {found}")
    series: dict[tuple[str, str], dict[int, str]] = {}
    for name in shards.present:
        if match := _NUMBERED.fullmatch(name):
            series.setdefault((match["stem"], match["total"]), {})[int(match["number"])] = match["number"]
    for (stem, total), numbers in series.items():
        width = len(next(iter(numbers.values())))
        for number in range(1, int(total) + 1):
            if number not in numbers:
                detail = f"one of {int(total)} by the names of the others, it is not in the folder"
                missing = f"{stem}-{number:0{width}d}-of-{total}.safetensors"
                shards.faults.append(Fault("missing shard", missing, detail))
