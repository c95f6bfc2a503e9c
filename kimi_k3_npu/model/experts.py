"""The routed experts that one rank holds, in whatever format their matrices are kept.

Letters: T tokens, E experts held here, k experts of a token, L width of their input and output, I width inside. A
matrix is [rows, columns] as in y = x @ W.T; w13 stacks w1 (gate) and w3 (up).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.formats import Format
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, Piece, Slices

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
    """This rank's share of the routed experts, kept in a format: whole experts over ep, their width over moe_tp."""

    def __init__(self, config: TextConfig, mesh: Mesh, dtype: torch.dtype, format: Format) -> None:
        super().__init__()
        held = mesh.ep.part(config.num_experts, "routed experts")
        self.first, dealt = held.start, mesh.ep.size
        self.betas, self.dtype, self.format = config.activation_betas, dtype, format
        latent, inner, count = config.expert_hidden_size, config.moe_intermediate_size, held.stop - held.start
        unit = max(size for stored in format.kept.values() for size in (stored.rows, stored.columns))
        units = mesh.moe_tp.part(inner // unit, "expert width" if unit == 1 else f"expert width / {unit}")
        share = range(units.start * unit, units.stop * unit)  # of the rows of w1 and w3, and of the columns of w2
        width = len(share)
        for suffix, stored in format.kept.items():
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

    def prepare(self) -> None:
        """Lay the matrices out for this device's products, if that has not been done since they were loaded."""
        for name in ("w13", "w2"):
            kept = {suffix: self.get_parameter(name + suffix) for suffix in self.format.kept}
            if all(self.is_as_published(name + suffix) for suffix in kept):
                for suffix, values in self.format.lay_out(kept, self.dtype).items():
                    self.lay_out(name + suffix, values)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, L], weights fp32 [T, k], ids [T, k] -> [T, L], the weighted sum over what is held here."""
        w13, w2 = ([getattr(self, name + suffix) for suffix in self.format.kept] for name in ("w13", "w2"))
        return self.format.product(x, weights, ids, w13, w2, self.is_laid_out, self.first, *self.betas)
