"""Read the weights of a plan, one whole weight after the other, and look inside each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kimi_k3_npu.checkpoint.byte_ranges import select
from kimi_k3_npu.checkpoint.plan import Assignment
from kimi_k3_npu.checkpoint.reader import Checkpoint, ReadRequest
from kimi_k3_npu.errors import Fault

#: Bytes of unfinished weights that may wait for the rest of their tensors.
WAITING = 256 << 20


def read_weights(
    checkpoint: Checkpoint,
    assignments: Sequence[Assignment],
    faults: list[Fault],
    *,
    scan: bool = True,
    on_bytes: Callable[[int], None] | None = None,
    on_tensor: Callable[[str, Tensor], None] | None = None,
) -> Iterator[tuple[Assignment, dict[str, Tensor]]]:
    """Read what `assignments` ask for, and yield each weight as soon as all its tensors have arrived.

    Yields the assignment of one of its tensors, and the tensors as they are stored by what follows the weight's name.
    What is wrong inside them is added to `faults`; a weight that its row cannot fix is not yielded.

    Args:
        scan: Look for NaN and infinity, and for what the format of a weight forbids.
        on_bytes: Called with the size of each tensor that has arrived.
        on_tensor: Called with the name of each and the tensor.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for request, tensor in _in_order(checkpoint, assignments):
        if on_bytes:
            on_bytes(tensor.nbytes)
        if on_tensor:
            on_tensor(request.name, tensor)
        assignment: Assignment = request.key
        target = assignment.target
        if scan and (found := non_finite(tensor)):
            detail = f"{found} of {tensor.numel()} values are NaN or infinite"
            faults.append(Fault("not finite", assignment.name, detail))
        if target.row.fix:
            try:
                target.row.fix(tensor, assignment.record.shape)
            except ValueError as error:
                faults.append(Fault("wrong content", assignment.name, str(error)))
                continue
        tensors = waiting.setdefault(target.weight, {})
        tensors[target.part.suffix] = tensor
        if len(tensors) < len(target.format.parts):
            continue
        del waiting[target.weight]
        if scan and (fault := target.format.fault(tensors)):
            faults.append(Fault("wrong content", assignment.name, fault))
        yield assignment, tensors


def _in_order(checkpoint: Checkpoint, assignments: Sequence[Assignment]) -> Iterator[tuple[ReadRequest, Tensor]]:
    """Read in the order of the files if no more than WAITING bytes then wait for the rest of their weights; else weight
    by weight, as many together as have that size."""
    if _most_waiting(checkpoint, assignments) <= WAITING:
        yield from checkpoint.stream(map(_request, assignments))
        return
    weights: dict[str, list[Assignment]] = {}
    for assignment in sorted(assignments, key=partial(_place, checkpoint)):
        weights.setdefault(assignment.target.weight, []).append(assignment)
    together: list[Assignment] = []
    size = 0
    for parts in weights.values():
        size += bytes_to_read(checkpoint, parts)
        if together and size > WAITING:
            yield from checkpoint.stream(map(_request, together))
            together, size = [], bytes_to_read(checkpoint, parts)
        together += parts
    yield from checkpoint.stream(map(_request, together))


def _most_waiting(checkpoint: Checkpoint, assignments: Iterable[Assignment]) -> int:
    """The most bytes of unfinished weights when all are read in the order of the files."""
    several = [assignment for assignment in assignments if len(assignment.target.format.parts) > 1]
    begun: dict[str, list[int]] = {}
    waiting = most = 0
    for assignment in sorted(several, key=partial(_place, checkpoint)):
        sizes = begun.setdefault(assignment.target.weight, [])
        sizes.append(bytes_to_read(checkpoint, [assignment]))
        waiting += sizes[-1]
        most = max(most, waiting)
        if len(sizes) == len(assignment.target.format.parts):
            waiting -= sum(sizes)
    return most


def _place(checkpoint: Checkpoint, assignment: Assignment) -> tuple[str, int]:
    entry = checkpoint.entries[assignment.name]
    return str(entry.file), entry.offset


def _request(assignment: Assignment) -> ReadRequest:
    return ReadRequest(assignment.name, assignment.source, assignment)


def bytes_to_read(checkpoint: Checkpoint, assignments: Iterable[Assignment]) -> int:
    """The size of what `read_weights` reads."""
    return sum(select(checkpoint.entries[found.name], found.source).nbytes for found in assignments)


def non_finite(tensor: Tensor) -> int:
    """How many values of `tensor` are NaN or infinite.

    A sum is not finite if one of its terms is not, and takes a thirtieth of the time of looking at each.
    """
    if not tensor.dtype.is_floating_point or tensor.sum(dtype=_sum_dtype(tensor)).isfinite():
        return 0
    return int((~tensor.isfinite()).sum())


def _sum_dtype(tensor: Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype == torch.float16 else None  # whose own sums soon overflow
