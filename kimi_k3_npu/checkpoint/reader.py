"""A checkpoint folder in safetensors form: every tensor's place, and reading exact slices of them.

`Checkpoint.open` parses all headers and reports everything that is wrong with the files in one error. Whether the
tensors are the right ones for a model is not asked here.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kimi_k3_npu.checkpoint.byte_ranges import MAX_GAP, MAX_READ, Selection, open_for_slices, read_selections, select
from kimi_k3_npu.checkpoint.folder import find_shards, match_index
from kimi_k3_npu.checkpoint.safetensors_header import TensorEntry, read_header
from kimi_k3_npu.errors import CheckpointError, Fault

__all__ = ["Checkpoint", "ReadRequest", "TensorEntry"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's garbage collector away from what makes millions of objects and no garbage for it to look for."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class ReadRequest:
    """A slice to read: `source` has a plain slice for each leading dimension that is cut, `key` is the caller's own."""

    name: str
    source: tuple[slice, ...] = ()
    key: Any = None


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. No file stays open between reads.

    Args:
        folder: Where it is.
        entries: Every tensor by its name.
        metadata: By file name: each shard's `__metadata__`, and the `metadata` of the index (`total_size`).
        unindexed_files: Names of *.safetensors files in the folder that are not part of the checkpoint, sorted.
    """

    folder: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, dict[str, Any]]
    unindexed_files: tuple[str, ...]

    @classmethod
    @collector_paused()
    def open(cls, path: str | Path) -> Checkpoint:
        """Open the checkpoint in folder `path`: the shards that its index names, else the files with the usual names.

        Raises:
            CheckpointError: With all faults of the index, the file names and the shard headers.
        """
        folder = Path(path)
        found = find_shards(folder)
        headers = {name: read_header(folder / name, name) for name in found.present}
        faults = [*found.faults, *(fault for header in headers.values() for fault in header.faults)]
        entries: dict[str, TensorEntry] = {}
        for header in headers.values():
            for entry in header.entries:
                first = entries.setdefault(entry.name, entry)
                if first is not entry:
                    files = f"in {first.file.relative_to(folder)} and {entry.file.relative_to(folder)}"
                    faults.append(Fault("duplicate tensor", entry.name, files))
        faults += match_index(found, headers)
        if faults:
            raise CheckpointError.from_faults(folder, faults)
        metadata = found.metadata | {name: header.metadata for name, header in headers.items()}
        return cls(folder, entries, metadata, found.unindexed)

    @property
    def total_bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    def read(self, name: str, source: tuple[slice, ...] = ()) -> Tensor:
        """Tensor `name`, or the slice `source` of it, fresh and contiguous.

        Raises:
            CheckpointError: No such tensor, or its file has been cut since.
            ValueError: `source` is not a plain slice inside the tensor.
        """
        ((selection, _),) = self._selections([ReadRequest(name, source)])
        fd = open_for_slices(selection.entry.file)
        try:
            (tensor,), _ = read_selections(fd, [selection])
        finally:
            os.close(fd)
        return tensor

    def stream(
        self,
        requests: Iterable[ReadRequest],
        *,
        threads: int = 4,
        max_bytes_in_flight: int = 256 << 20,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[ReadRequest, Tensor]]:
        """Read many slices with `threads` threads and yield (request, tensor), in the order they lie in the files.

        Slices that lie together are read together, up to MAX_READ; a slice that alone is longer is read by one thread.
        What is read ahead of the consumer stays below `max_bytes_in_flight`, except that a slice larger than that is
        read by itself. Leaving the iteration early stops the threads and closes the files.

        Args:
            requests: What to read, in any order. The same tensor may be asked for several times.
            on_bytes: Called in the consumer's thread with the number of bytes read from a file, gaps included.

        Raises:
            CheckpointError: At once, with all names that do not exist; while iterating, if a file has been cut since.
            ValueError: At once, if a `source` is not a plain slice inside its tensor.
        """
        batches = _batches(self._selections(requests))
        return _stream(batches, threads, max_bytes_in_flight, on_bytes or (lambda count: None))

    def _selections(self, requests: Iterable[ReadRequest]) -> list[tuple[Selection, ReadRequest]]:
        requests = list(requests)
        unknown = dict.fromkeys(request.name for request in requests if request.name not in self.entries)
        if unknown:
            detail = "asked for, but no shard has it"
            raise CheckpointError.from_faults(self.folder, [Fault("missing tensor", name, detail) for name in unknown])
        return [(select(self.entries[request.name], request.source), request) for request in requests]


@dataclass
class _Batch:
    """Slices of one file that one thread reads in one go."""

    selections: list[Selection]
    requests: list[ReadRequest]

    @property
    def nbytes(self) -> int:
        return sum(selection.nbytes for selection in self.selections)


def _batches(selections: list[tuple[Selection, ReadRequest]]) -> Iterator[_Batch]:
    """Group slices that are neighbours in a file, up to MAX_READ a batch."""
    batch = _Batch([], [])
    begin = end = 0
    for selection, request in sorted(selections, key=lambda pair: (str(pair[0].entry.file), pair[0].offset)):
        apart = not batch.selections or selection.entry.file != batch.selections[0].entry.file
        if apart or selection.offset - end > MAX_GAP or max(selection.end, end) - begin > MAX_READ:
            if batch.selections:
                yield batch
            batch = _Batch([], [])
            begin = end = selection.offset
        batch.selections.append(selection)
        batch.requests.append(request)
        end = max(end, selection.end)
    if batch.selections:
        yield batch


def _stream(
    batches: Iterator[_Batch], threads: int, max_bytes_in_flight: int, on_bytes: Callable[[int], None]
) -> Iterator[tuple[ReadRequest, Tensor]]:
    files: dict[Path, int] = {}
    pending: deque[tuple[_Batch, Future[tuple[list[Tensor], int]]]] = deque()
    in_flight = 0
    pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-read")

    def finish() -> Iterator[tuple[ReadRequest, Tensor]]:
        batch, future = pending.popleft()
        tensors, count = future.result()
        on_bytes(count)
        yield from zip(batch.requests, tensors, strict=True)

    try:
        for batch in batches:
            while pending and in_flight + batch.nbytes > max_bytes_in_flight:
                in_flight -= pending[0][0].nbytes
                yield from finish()
            file = batch.selections[0].entry.file
            if file not in files:
                files[file] = open_for_slices(file)
            pending.append((batch, pool.submit(read_selections, files[file], batch.selections)))
            in_flight += batch.nbytes
        while pending:
            yield from finish()
    finally:
        # The files close only when no thread reads them any more.
        pool.shutdown(wait=True, cancel_futures=True)
        for fd in files.values():
            os.close(fd)
