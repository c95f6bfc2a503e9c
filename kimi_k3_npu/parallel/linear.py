"""Linear layers without bias, whole or sharded, one weight each. `o` rows out, `i` columns in, as in torch: y = x @
W.T."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.shard import Layer, Piece, split, whole

#: Stands for "every rank holds all rows": written out, so that replication is a decision and never a default.
REPLICATED = Group("replicated")


class MergedLinear(Layer):
    """Several projections of one input as one matmul. Each has its own rows and its own group to split them over."""

    def __init__(self, in_features: int, rows: Mapping[str, tuple[int, Group]], dtype: torch.dtype) -> None:
        super().__init__()
        pieces: dict[str, Piece] = {}
        self.sizes: list[int] = []
        start = 0
        for name, (total, group) in rows.items():
            part = group.part(total, name)
            size = part.stop - part.start
            pieces[name] = Piece((total, in_features), (part,) if group.size > 1 else (), (slice(start, start + size),))
            self.sizes.append(size)
            start += size
        self.weight = self.allocate("weight", (start, in_features), pieces, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, i] -> [T, sum of rows], the projections side by side in the order they were given."""
        return F.linear(x, self.weight)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """The same, as one [T, rows] view per projection."""
        return self(x).split(self.sizes, dim=-1)


class ColumnLinear(Layer):
    """Output rows split over `group`: each rank computes its own columns of the result."""

    def __init__(self, in_features: int, out_features: int, group: Group, what: str, dtype: torch.dtype) -> None:
        super().__init__()
        piece = split((out_features, in_features), 0, group, what)
        self.weight = self.allocate("weight", (out_features // group.size, in_features), piece, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RowLinear(Layer):
    """Input columns split over `group`: each rank returns a partial sum, which the caller completes."""

    def __init__(self, in_features: int, out_features: int, group: Group, what: str, dtype: torch.dtype) -> None:
        super().__init__()
        piece = split((out_features, in_features), 1, group, what)
        self.weight = self.allocate("weight", (out_features, in_features // group.size), piece, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class ReplicatedLinear(Layer):
    """Every rank holds the whole weight."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.allocate("weight", (out_features, in_features), whole(out_features, in_features), dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)
