"""The routed experts that one rank holds, in each form in which their matrices can be kept.

Letters: T tokens, E experts held here, k experts of a token, L width of their input and output, I width inside. A
matrix is [rows, columns] as in y = x @ W.T; w13 stacks w1 (gate) and w3 (up).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kimi_k3_npu.config import MXFP4_GROUP, TextConfig
from kimi_k3_npu.ops.experts import moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.experts_int4 import int4_layout, moe_experts_int4_group, moe_experts_w4a8, w4a8_layout
from kimi_k3_npu.ops.formats import mxfp4_layout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, Piece, Slices


@dataclass(frozen=True)
class Stored:
    """One of the tensors that hold a matrix. One of its elements is for `rows` rows and `columns` columns of the matrix
    (columns 0: for all of them). `dtype` None is the model's; `transposed` says that its rows are the matrix's columns.
    """

    dtype: torch.dtype | None = None
    rows: int = 1
    columns: int = 1
    transposed: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the tensor for a matrix [rows, columns]."""
        shape = (rows // self.rows, columns // self.columns if self.columns else 1)
        return shape[::-1] if self.transposed else shape


#: A slice of each dimension, as a range, which has a hash where a slice has none; None for all of it.
Box = tuple[range | None, ...]


@lru_cache(maxsize=32)
def _pieces(
    first: int, count: int, dealt: int, matrix: tuple[int, int], source: Box, places: tuple[tuple[str, Box], ...]
) -> dict[str, Piece]:
    """Of experts `first` and following: `source` of each matrix, at its place. All layers of a model share the records,
    which are half a million otherwise."""
    read = _slices(source)
    return {
        f"{first + e}.{name}": Piece(matrix, read, (slice(e, e + 1), *_slices(place)), dealt)
        for e in range(count)
        for name, place in places
    }


def _slices(box: Box) -> Slices:
    return tuple(slice(None) if part is None else slice(part.start, part.stop) for part in box)


class Experts(Layer):
    """This rank's share of the routed experts, as plain matrices: whole experts over ep, their width over moe_tp."""

    #: What each matrix is kept in, by what follows the parameter's name.
    stored: ClassVar[dict[str, Stored]] = {"": Stored()}

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        held = mesh.ep.part(config.num_experts, "routed experts")
        self.first, dealt = held.start, mesh.ep.size
        self.betas, self.dtype = config.activation_betas, dtype
        latent, inner, count = config.expert_hidden_size, config.moe_intermediate_size, held.stop - held.start
        unit = max(size for stored in self.stored.values() for size in (stored.rows, stored.columns))
        units = mesh.moe_tp.part(inner // unit, "expert width" if unit == 1 else f"expert width / {unit}")
        share = range(units.start * unit, units.stop * unit)  # of the rows of w1 and w3, and of the columns of w2
        width = len(share)
        for suffix, stored in self.stored.items():
            upper, lower = stored.shape(width, latent), stored.shape(latent, width)
            dim = int(stored.transposed)  # along which w1 and w3 are stacked
            half = upper[dim]
            across = (None,) * dim
            places = (("w1", (*across, range(half))), ("w3", (*across, range(half, 2 * half))))
            stacked = (2 * half, upper[1]) if dim == 0 else (upper[0], 2 * half)
            kept = stored.dtype or dtype
            w13 = _pieces(self.first, count, dealt, (inner, latent), (share,), places)
            self.allocate(f"w13{suffix}", (count, *stacked), w13, kept)
            w2 = _pieces(self.first, count, dealt, (latent, inner), (None, share), (("w2", ()),))
            self.allocate(f"w2{suffix}", (count, *lower), w2, kept)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, L], weights fp32 [T, k], ids [T, k] -> [T, L], the weighted sum over what is held here."""
        return moe_experts(x, weights, ids, self.w13, self.w2, self.first, *self.betas)


class PackedExperts(Experts):
    """MXFP4: two 4-bit floats a byte and one scale for each 32 inputs."""

    stored: ClassVar[dict[str, Stored]] = {
        "_packed": Stored(torch.uint8, columns=2),
        "_scale": Stored(torch.uint8, columns=MXFP4_GROUP),
    }

    def prepare(self) -> None:
        """Lay the codes out for this device's products."""
        for name in ("w13_packed", "w2_packed"):
            self.lay_out(name, mxfp4_layout(self.get_parameter(name)))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        matrices = (self.w13_packed, self.w13_scale, self.w2_packed, self.w2_scale)
        return moe_experts_mxfp4(x, weights, ids, *matrices, self.first, *self.betas)


class W4A8Experts(Experts):
    """ModelSlim's W4A8: two rows of 4-bit integers a byte and one scale a row. The bias completes an NPU's product."""

    stored: ClassVar[dict[str, Stored]] = {
        "": Stored(torch.int8, rows=2),
        "_scale": Stored(torch.float32, columns=0),
        "_bias": Stored(torch.float32, columns=0),
    }

    def prepare(self) -> None:
        """Lay the matrices out for this device's products."""
        for matrix in ("w13", "w2"):
            names = [matrix + suffix for suffix in self.stored]
            for name, values in zip(names, w4a8_layout(*map(self.get_parameter, names)), strict=True):
                self.lay_out(name, values)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        matrices = (self.w13, self.w13_scale, self.w13_bias, self.w2, self.w2_scale, self.w2_bias)
        return moe_experts_w4a8(x, weights, ids, *matrices, self.first, *self.betas)


class Int4PairExperts(Experts):
    """MXFP4's values on hardware without 4-bit floats: the sum of two 4-bit integers, under one scale for 32 inputs.

    Transposed and eight integers a word, in one order in files and another that a device's products may want.
    """

    stored: ClassVar[dict[str, Stored]] = {
        "_first": Stored(torch.int32, rows=8, transposed=True),
        "_second": Stored(torch.int32, rows=8, transposed=True),
        "_scale": Stored(torch.bfloat16, columns=MXFP4_GROUP, transposed=True),
    }

    def prepare(self) -> None:
        """Lay the codes out for this device's products. Both layouts look alike, so none is laid out twice."""
        for name in ("w13_first", "w13_second", "w2_first", "w2_second"):
            if self.is_as_published(name):
                self.lay_out(name, int4_layout(self.get_parameter(name), self.dtype))

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        w13, w2 = [self.w13_first, self.w13_second], [self.w2_first, self.w2_second]
        matrices = (w13, self.w13_scale, w2, self.w2_scale, self.is_laid_out)
        return moe_experts_int4_group(x, weights, ids, *matrices, self.first, *self.betas)


#: The forms in which routed experts can be kept in memory.
ExpertForm = Literal["plain", "mxfp4", "w4a8", "int4x2"]
EXPERTS: dict[ExpertForm, type[Experts]] = {
    "plain": Experts,
    "mxfp4": PackedExperts,
    "w4a8": W4A8Experts,
    "int4x2": Int4PairExperts,
}
