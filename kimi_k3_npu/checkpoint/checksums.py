"""Checksums of every tensor of a checkpoint. They show what no loader can see: a value changed, a square transposed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_k3_npu.checkpoint.reader import Checkpoint, ReadRequest
from kimi_k3_npu.checkpoint.safetensors_header import DTYPES, TensorEntry, load_json
from kimi_k3_npu.checkpoint.writer import bytes_of, write_text
from kimi_k3_npu.config import read_config_file
from kimi_k3_npu.errors import ConfigError, Fault

#: Stands in the file, so that no other JSON is taken for one.
FORMAT = "kimi-k3-npu checksums 1"

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Checksum:
    """One tensor: the dtype by its name in safetensors, and the SHA-256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Checksums:
    """A checkpoint: its config.json, and its tensors by name. How they are spread over files does not matter."""

    config: dict[str, Any]
    tensors: dict[str, Checksum]

    @classmethod
    def of(cls, folder: Path, on_bytes: Callable[[int], None] | None = None) -> Checksums:
        """Read all of the checkpoint in `folder`."""
        checkpoint = Checkpoint.open(folder)
        found = {}
        for request, tensor in checkpoint.stream(map(ReadRequest, checkpoint.entries), on_bytes=on_bytes):
            entry = checkpoint.entries[request.name]
            found[request.name] = Checksum(_DTYPE_NAMES[entry.dtype], entry.shape, sha256(tensor))
        return cls(read_config_file(folder), {name: found[name] for name in checkpoint.entries})

    @classmethod
    def read(cls, file: Path) -> Checksums:
        """Raises ConfigError for a file that `write` has not written."""
        try:
            fields = load_json(file.read_bytes(), lambda key: None)
            if fields.get("format") != FORMAT:
                raise ValueError(f"format is {fields.get('format')!r:.80}, expected {FORMAT!r}")
            tensors = {
                name: Checksum(dtype, tuple(shape), digest)
                for name, (dtype, shape, digest) in fields["tensors"].items()
            }
            return cls(fields["config"], tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file}: no file of checksums that `weights checksum` wrote ({error})") from None

    def write(self, file: Path) -> None:
        tensors = {name: [entry.dtype, entry.shape, entry.sha256] for name, entry in self.tensors.items()}
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items())
        config = json.dumps(self.config, ensure_ascii=False)
        write_text(file, f'{{"format": {json.dumps(FORMAT)},\n "config": {config},\n "tensors": {{\n{lines}\n }}\n}}\n')

    def config_faults(self, config: Mapping[str, Any]) -> Iterator[Fault]:
        """The fields in which `config` is another."""
        wanted, found = dict(_flat(self.config)), dict(_flat(config))
        for name in [*wanted, *(name for name in found if name not in wanted)]:
            if wanted.get(name, _ABSENT) != found.get(name, _ABSENT):
                detail = f"is {found.get(name, _ABSENT)}, the manifest has {wanted.get(name, _ABSENT)}"
                yield Fault("config differs from the manifest", name, detail)

    def header_faults(self, entries: Mapping[str, TensorEntry]) -> Iterator[Fault]:
        """Tensors that are missing, too many, or of another dtype or shape."""
        for name, wanted in self.tensors.items():
            if name not in entries:
                yield Fault("missing, by the manifest", name, "the manifest has it, no shard has it")
                continue
            entry = entries[name]
            found = (_DTYPE_NAMES[entry.dtype], entry.shape)
            if found != (wanted.dtype, wanted.shape):
                detail = f"is {found[0]} {list(found[1])}, the manifest has {wanted.dtype} {list(wanted.shape)}"
                yield Fault("differs from the manifest", name, detail)
        for name in entries:
            if name not in self.tensors:
                yield Fault("not in the manifest", name, "the manifest does not have it")

    def content_fault(self, name: str, tensor: Tensor) -> Fault | None:
        """Whether `tensor` has other values; None also when it is none of this manifest's in dtype or shape."""
        wanted = self.tensors.get(name)
        if wanted is None or (_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) != (wanted.dtype, wanted.shape):
            return None
        if (found := sha256(tensor)) == wanted.sha256:
            return None
        detail = f"its values are others: SHA-256 {found[:16]}..., the manifest has {wanted.sha256[:16]}..."
        return Fault("differs from the manifest", name, detail)


def sha256(tensor: Tensor) -> str:
    """Of the bytes that a file has of `tensor`."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their dotted path."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{prefix}.{name}" if prefix else name)
