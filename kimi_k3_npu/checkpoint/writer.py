"""Write safetensors files tensor by tensor, and files that are whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kimi_k3_npu.checkpoint.manifest import TensorSpec
from kimi_k3_npu.checkpoint.safetensors_header import DTYPES

#: Bytes of the largest element there is.
ALIGNMENT = 8

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class ShardWriter:
    """A safetensors file under construction at `path`. Tensors may come in any order; each must come once.

    Holds nothing in memory. Tensors lie in the order given, so that those of one weight are read together, and each
    begins at a multiple of its element's size: those that would move the next off come last, larger elements first.
    """

    def __init__(self, path: Path, tensors: Iterable[TensorSpec]) -> None:
        self._path = path
        self._missing: dict[str, tuple[TensorSpec, int]] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for spec in sorted(tensors, key=lambda spec: -spec.dtype.itemsize if spec.nbytes % ALIGNMENT else -ALIGNMENT):
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.nbytes],
            }
            self._missing[spec.name] = (spec, end)
            end += spec.nbytes
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        self._start = 8 + len(raw)
        self._fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        _write_all(self._fd, len(raw).to_bytes(8, "little") + raw, 0)

    def write(self, name: str, tensor: Tensor) -> None:
        spec, offset = self._missing.pop(name)
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype), (name, tensor.shape, tensor.dtype, spec)
        _write_all(self._fd, bytes_of(tensor), self._start + offset)

    def finish(self, final: Path) -> None:
        """Move the complete file to `final`: from here on it is whole, whatever happens to this process."""
        assert not self._missing, f"never written: {sorted(self._missing)}"
        os.fsync(self._fd)
        self.close()
        move(self._path, final)

    def close(self) -> None:
        """Give up the file, whatever state it is in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of `tensor` as a file has them: row-major, little-endian."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data


def write_shard(file: Path, tensors: dict[str, Tensor]) -> None:
    """Write all of a safetensors file, to the disk, with the mode that the umask gives to new files."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})  # puts a file of its own there, which only its owner may read
    file.chmod(mode)
    _sync(file)


def write_text(file: Path, text: str) -> None:
    """Write `file` whole or not at all; a device or pipe is written to as it is."""
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    part = file.with_name(f"{file.name}.part")
    with open(part, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    move(part, file)


def move(part: Path, final: Path) -> None:
    """Rename, and have the folder remember it."""
    part.replace(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Have the disk hold the file, or the names in the folder, that is at `path`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
