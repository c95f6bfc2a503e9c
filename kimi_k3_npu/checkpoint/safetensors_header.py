"""The header of one safetensors file: which bytes are which tensor, and everything that is wrong with it.

The format (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length, the header as JSON,
then the data, whose every byte belongs to exactly one tensor. The header is parsed here and not by the safetensors
library because that reports the first fault only, names no file, and keeps the last of two entries with one name.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch

from kimi_k3_npu.errors import Fault

#: Dtypes by their name in a header. Those below a byte an element are left out: no Kimi-K3 checkpoint has them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

#: The longest header the safetensors library accepts; a longer one is a file of some other kind.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor is: `nbytes` bytes from byte `offset` of `file`, row-major, little-endian."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What the header of `file` says. With faults, `entries` holds the tensors that could still be made sense of."""

    file: Path
    entries: list[TensorEntry]
    metadata: dict[str, Any]
    faults: list[Fault]


def read_header(file: Path, name: str) -> Header:
    """Parse and check the header of `file`, called `name` in faults. Raises nothing that is the file's fault."""
    header = Header(file, [], {}, [])
    try:
        with open(file, "rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):  # without it, the disk reads megabytes beyond the header
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            file_size = stream.seek(0, 2)
            stream.seek(0)
            length = int.from_bytes(stream.read(8), "little")
            if problem := _length_problem(length, file_size):
                header.faults.append(Fault("truncated or not safetensors", name, problem))
                return header
            raw = _read_exactly(stream, length)
    except OSError as error:
        header.faults.append(Fault("unreadable shard", name, error.strerror or str(error)))
        return header
    try:
        fields = load_json(raw, lambda key: header.faults.append(Fault("duplicate key", key, f"twice in {name}")))
        metadata = fields.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict):
            raise ValueError(f"__metadata__ is {metadata!r:.200}, expected an object")
    except ValueError as error:
        header.faults.append(Fault("broken shard header", name, str(error)))
        return header
    header.metadata.update(metadata)
    for tensor, spec in fields.items():
        entry = _entry(tensor, spec, file, 8 + length)
        if isinstance(entry, TensorEntry):
            header.entries.append(entry)
        else:
            header.faults.append(Fault("broken tensor entry", tensor, f"{entry} (in {name})"))
    if not header.faults:
        header.faults.extend(_coverage_faults(header.entries, name, 8 + length, file_size))
    return header


def _read_exactly(stream: RawIOBase, length: int) -> bytes:
    """`length` bytes, or all there are: a single read may return fewer."""
    raw = b""
    while len(raw) < length and (more := stream.read(length - len(raw))):
        raw += more
    return raw


def load_json(raw: bytes, on_duplicate: Callable[[str], None]) -> dict[str, Any]:
    """Parse a JSON object, calling `on_duplicate(key)` for each key that some object has twice (JSON keeps the last).

    Raises ValueError, saying where it breaks, if `raw` is not UTF-8 JSON or not an object.
    """

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            for key, count in Counter(key for key, _ in pairs).items():
                if count > 1:
                    on_duplicate(key)
        return result

    try:
        value = json.loads(raw.decode(), object_pairs_hook=build)
    except RecursionError:
        raise ValueError("not valid JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a JSON {type(value).__name__}, expected an object")
    return value


def _length_problem(length: int, file_size: int) -> str | None:
    if file_size < 8:
        return f"{file_size} bytes on disk, the header length alone takes 8"
    if not 0 < length <= MAX_HEADER_BYTES:
        return f"header length {length}, expected 1 to {MAX_HEADER_BYTES}"
    if 8 + length > file_size:
        return f"the header ends at byte {8 + length}, {file_size} bytes on disk"
    return None


def _entry(name: str, spec: Any, file: Path, data_start: int) -> TensorEntry | str:
    """The tensor that a header describes by `spec`, or what is wrong with the description."""
    if not isinstance(spec, dict) or not spec.keys() >= {"dtype", "shape", "data_offsets"}:
        return f"expected dtype, shape and data_offsets, found {spec!r:.200}"
    shape, offsets = spec["shape"], spec["data_offsets"]
    dtype = DTYPES.get(spec["dtype"]) if isinstance(spec["dtype"], str) else None
    if dtype is None:
        return f"unknown dtype {spec['dtype']!r}; known: {', '.join(DTYPES)}"
    if not _is_counts(shape):
        return f"shape {shape!r} is not a list of sizes"
    if not _is_counts(offsets) or len(offsets) != 2:
        return f"data_offsets {offsets!r} are not [begin, end]"
    begin, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        return f"data_offsets [{begin}, {end}] hold {end - begin} bytes, {spec['dtype']} {shape} takes {nbytes}"
    return TensorEntry(name, file, dtype, tuple(shape), data_start + begin, nbytes)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _coverage_faults(entries: list[TensorEntry], name: str, data_start: int, file_size: int) -> list[Fault]:
    """What keeps `entries` from covering bytes `data_start` to `file_size` exactly once."""
    faults = []
    covered = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset < covered and entry.nbytes:
            detail = f"starts at byte {entry.offset} of {name}, inside the tensor before it, which ends at {covered}"
            faults.append(Fault("overlapping tensors", entry.name, detail))
        elif entry.offset > covered:
            detail = f"bytes {covered} to {entry.offset}, before {entry.name}, belong to no tensor"
            faults.append(Fault("unclaimed bytes", name, detail))
        covered = max(covered, entry.offset + entry.nbytes)
    if covered > file_size:
        detail = f"the tensors end at byte {covered}, {file_size} bytes on disk"
        faults.append(Fault("truncated or not safetensors", name, detail))
    elif covered < file_size:
        detail = f"bytes {covered} to {file_size}, at the end, belong to no tensor"
        faults.append(Fault("unclaimed bytes", name, detail))
    return faults
