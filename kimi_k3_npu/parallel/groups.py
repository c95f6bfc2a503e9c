"""Groups of ranks as values: a rank, a size, and the process group that carries the collectives.

A `Group` can be made without any process group, so rank 3 of 64 can be built on a laptop to see what it would hold.
Only a collective over more than one rank needs the process group. Collectives take the row counts of all ranks as
arguments, so which ones run, and in which order, never depends on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.parallel.layout import near_divisors


@dataclass(frozen=True, eq=False)
class Group:
    """`rank` of `size` along the axis `name`; size 1 needs no transport and every collective is the identity."""

    name: str
    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None

    def part(self, total: int, what: str) -> slice:
        """This rank's share of `total` rows. Raises LayoutError when the group does not divide it."""
        if total % self.size:
            sizes = near_divisors(total, self.size)
            raise LayoutError(f"{what} = {total} does not split over {self.name} = {self.size}; sizes that do: {sizes}")
        share = total // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def padded_part(self, total: int) -> tuple[int, slice]:
        """The size of a share when `total` is padded to whole ones, and which of the `total` rows are this rank's."""
        share = -(-total // self.size)
        first = min(self.rank * share, total)
        return share, slice(first, min(first + share, total))

    def chunks(self, rows: int) -> list[int]:
        """How `rows` activations are dealt out over the ranks: contiguous, and even to within one row."""
        return [rows * (i + 1) // self.size - rows * i // self.size for i in range(self.size)]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of every rank's `x`, on every rank. May overwrite `x`."""
        if self.size > 1 and x.numel():
            dist.all_reduce(x, group=self.transport)
        return x

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every rank's rows, in rank order: x [counts[rank], ...] -> [sum(counts), ...]."""
        assert len(x) == counts[self.rank], (self.name, self.rank, len(x), list(counts))
        if self.size == 1:
            return x
        if not any(counts) or 0 in x.shape[1:]:  # nothing to send, as every rank can tell
            return x.new_empty(sum(counts), *x.shape[1:])
        largest = max(counts)
        padded = torch.cat([x, x.new_zeros(largest - len(x), *x.shape[1:])]) if len(x) < largest else x.contiguous()
        gathered = x.new_empty(self.size * largest, *x.shape[1:])
        dist.all_gather_into_tensor(gathered, padded, group=self.transport)
        if min(counts) == largest:
            return gathered
        return torch.cat([gathered[i * largest : i * largest + n] for i, n in enumerate(counts)])

    def reduce_scatter(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Sum of every rank's `x` [sum(counts), ...], of which this rank keeps its rows [counts[rank], ...]."""
        assert len(x) == sum(counts), (self.name, self.rank, len(x), list(counts))
        if self.size == 1 or not any(counts):
            return x
        largest = max(counts)
        if min(counts) < largest:
            padded = x.new_zeros(self.size, largest, *x.shape[1:])
            for i, rows in enumerate(x.split(list(counts))):
                padded[i, : len(rows)] = rows
            x = padded.flatten(0, 1)
        kept = x.new_empty(largest, *x.shape[1:])
        dist.reduce_scatter_tensor(kept, x.contiguous(), group=self.transport)
        return kept[: counts[self.rank]]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first sent[0] rows to rank 0, the next sent[1] to rank 1, ...; the rows received, by sender."""
        if self.size == 1:
            return x
        arrived = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(arrived, x.contiguous(), list(received), list(sent), group=self.transport)
        return arrived

    def exchange_counts(self, sent: Tensor) -> Tensor:
        """What each rank will send to this one: sent int64 [size, ...], one entry a receiver -> the same by sender."""
        if self.size == 1:
            return sent
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.transport)
        return received

    def gather_value(self, value: int, device: torch.device) -> list[int]:
        """One number of every rank, in rank order."""
        if self.size == 1:
            return [value]
        mine = torch.tensor([value], device=device)
        return self.all_gather(mine, [1] * self.size).tolist()

    def bounds(self, counts: Sequence[int]) -> slice:
        """Where this rank's rows lie among all ranks' rows."""
        ends = list(accumulate(counts))
        return slice(ends[self.rank] - counts[self.rank], ends[self.rank])

    @property
    def transport(self) -> dist.ProcessGroup:
        """The process group. Raises LayoutError when the model was built without one."""
        if self.process_group is None:
            raise LayoutError(
                f"{self.name} spans {self.size} ranks but has no process group: this model was built to be inspected, "
                "not to run; start one process per rank and build its mesh with Mesh.distributed"
            )
        return self.process_group
