"""Which bytes of a file make up a slice of a tensor, and reading exactly those.

A slice of a row-major tensor is a number of equally long runs of bytes. Each run is read straight into its place in the
result, by one scattering read (`preadv`) for all runs that lie close together; the bytes between them go to a scratch
buffer. There is no mmap: with one, touching a tensor pulls in the disk's read-ahead window around it (often megabytes),
which adds up to whole files for a rank that needs a tenth of them.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kimi_k3_npu.checkpoint.safetensors_header import TensorEntry
from kimi_k3_npu.errors import CheckpointError

#: Up to how many bytes between two wanted runs are read and thrown away, not skipped. The disk reads whole 4 KiB pages:
#: skipping less than one saves nothing, and each skip is another request. More would defeat the purpose where ranks
#: share a matrix by columns: one rank of 16 wants 1.5 KiB of each 24 KiB row of an o_proj.
MAX_GAP = 4096

#: The longest single read, and what one thread is given at a time: long enough for a disk's full speed, short enough
#: that several threads have work.
MAX_READ = 32 << 20

#: The longest list of buffers that Linux and macOS take in one `preadv`.
_MAX_BUFFERS = 1024

# Where tensors begin in shared memory: a whole number of any dtype's elements, and of a processor's vectors.
_ALIGNMENT = 64

# What lies between runs is read into here by every thread at once and never looked at.
_SCRATCH = memoryview(bytearray(MAX_GAP))


@dataclass(frozen=True, slots=True)
class Selection:
    """The bytes of one slice of a tensor: runs of `run` bytes, the first at `offset`, repeated over `outer`.

    `outer` has (count, stride in bytes) for each dimension that steps from run to run, outermost first. `shape` is the
    slice's; a slice without elements has no runs (`nbytes` 0).
    """

    entry: TensorEntry
    shape: tuple[int, ...]
    offset: int
    run: int
    outer: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Size of the result."""
        return math.prod(self.shape) * self.entry.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte after the last one wanted."""
        if not self.nbytes:
            return self.offset
        return self.offset + sum((count - 1) * stride for count, stride in self.outer) + self.run

    def offsets(self) -> Iterator[int]:
        """Where each run starts in the file, in the order of the result's bytes."""
        if self.nbytes:
            steps = (range(0, count * stride, stride) for count, stride in self.outer)
            yield from (self.offset + sum(step) for step in itertools.product(*steps))


def select(entry: TensorEntry, source: tuple[slice, ...] = ()) -> Selection:
    """The bytes of `entry[source]`; dimensions that `source` does not reach are whole.

    Raises:
        ValueError: More slices than dimensions, a step, or a slice that is not inside the tensor. (Python would shorten
            it, and the rank would lack weights.)
    """
    if len(source) > len(entry.shape):
        raise ValueError(f"{entry.name}: {len(source)} slices for shape {list(entry.shape)}")
    starts, shape = [], []
    for dim, size in enumerate(entry.shape):
        part = source[dim] if dim < len(source) else slice(None)
        start = 0 if part.start is None else part.start
        stop = size if part.stop is None else part.stop
        if part.step not in (None, 1) or not 0 <= start <= stop <= size:
            raise ValueError(
                f"{entry.name}: {part} of dimension {dim} is not a plain slice inside shape {list(entry.shape)}"
            )
        starts.append(start)
        shape.append(stop - start)
    strides = [math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize for dim in range(len(shape))]
    cut = max((dim for dim, size in enumerate(entry.shape) if shape[dim] != size), default=0)
    return Selection(
        entry,
        shape=tuple(shape),
        offset=entry.offset + sum(start * stride for start, stride in zip(starts, strides, strict=True)),
        run=shape[cut] * strides[cut] if shape else entry.nbytes,
        outer=tuple(zip(shape[:cut], strides[:cut], strict=True)),
    )


def open_for_slices(file: Path) -> int:
    """A read-only file descriptor on which the kernel reads what is asked and nothing ahead. The caller closes it."""
    fd = os.open(file, os.O_RDONLY)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def read_selections(fd: int, selections: Sequence[Selection]) -> tuple[list[Tensor], int]:
    """Read `selections`, all of the file open as `fd`, into fresh contiguous tensors, in their order.

    The tensors lie in one piece of memory. Returns them and the number of bytes read, gaps included.

    Raises:
        CheckpointError: The file ends early: it has been cut or replaced since its header was read.
    """
    ends = list(itertools.accumulate(selection.nbytes + -selection.nbytes % _ALIGNMENT for selection in selections))
    # NumPy asks for huge pages: fresh memory in small ones takes longer than copying a file out of the page cache.
    memory = np.empty(max(1, ends[-1]), np.uint8)
    whole, tensors, pieces = torch.from_numpy(memory), list[Tensor](), list[tuple[int, memoryview]]()
    for selection, start in zip(selections, [0, *ends], strict=False):
        place = slice(start, start + selection.nbytes)
        tensors.append(whole[place].view(selection.entry.dtype).view(selection.shape))
        pieces.extend(_pieces(selection, memory[place].data))
    pieces.sort(key=lambda piece: piece[0])
    reads = list(_scattering_reads(pieces))
    if len(reads) > 1:
        _announce(fd, reads)
    total = sum(_fill(fd, selections[0].entry.file, offset, views) for offset, views in reads)
    return tensors, total


def _pieces(selection: Selection, view: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(file offset, place in the result) for each run, long runs cut to MAX_READ."""
    done = 0
    for offset in selection.offsets():
        for start in range(0, selection.run, MAX_READ):
            length = min(MAX_READ, selection.run - start)
            yield offset + start, view[done : done + length]
            done += length


def _scattering_reads(pieces: list[tuple[int, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Join `pieces`, sorted by offset, into (offset, buffers) for one `preadv` each."""
    begin = end = 0
    buffers: list[memoryview] = []
    for offset, view in pieces:
        gap = offset - end
        fits = offset + len(view) - begin <= MAX_READ and len(buffers) + 2 <= _MAX_BUFFERS
        if buffers and fits and 0 <= gap <= MAX_GAP:
            if gap:
                buffers.append(_SCRATCH[:gap])
        else:
            if buffers:
                yield begin, buffers
            begin, buffers = offset, []
        buffers.append(view)
        end = offset + len(view)
    if buffers:
        yield begin, buffers


def _announce(fd: int, reads: list[tuple[int, list[memoryview]]]) -> None:
    """Let the disk work on all `reads` at once: one after the other, thousands of short rows take its latency each."""
    if hasattr(os, "posix_fadvise"):
        for offset, views in reads:
            os.posix_fadvise(fd, offset, sum(map(len, views)), os.POSIX_FADV_WILLNEED)


def _fill(fd: int, file: Path, offset: int, buffers: list[memoryview]) -> int:
    """Fill `buffers` with the bytes of `file` from `offset` on; returns their number."""
    wanted = sum(map(len, buffers))
    done = 0
    while done < wanted:
        # One turn, unless a read stops early (a signal, a network file system).
        count = os.preadv(fd, _unfilled(buffers, done), offset + done)
        if not count:
            raise CheckpointError(
                f"{file}: ends at byte {offset + done}, a tensor reaches to byte {offset + wanted}; "
                "the file was cut or replaced after its header was read"
            )
        done += count
    return done


def _unfilled(buffers: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `buffers` behind their first `done` bytes."""
    for index, buffer in enumerate(buffers):
        if done < len(buffer):
            return [buffer[done:], *buffers[index + 1 :]]
        done -= len(buffer)
    return []
