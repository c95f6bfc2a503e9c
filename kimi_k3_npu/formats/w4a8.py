"""W4A8 as ModelSlim stores it (W4A8_DYNAMIC): two rows of 4-bit integers a byte, and one scale a row.

The scale_bias completes an NPU's product, which multiplies int8 rows nibble by nibble.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from kimi_k3_npu.formats.format import FLOAT, SEGMENTS, Format, Part, Stored, Tensors
from kimi_k3_npu.formats.w8a8 import MODELSLIM, ROW, SCALES, symmetry_fault
from kimi_k3_npu.ops.experts_int4 import moe_experts_w4a8, w4a8_bias, w4a8_layout, w4a8_matrix
from kimi_k3_npu.ops.int4 import HIGHEST, LOWEST, pack_rows, unpack_rows

#: How far a scale_bias may be from the recomputed one: this much of 8 * scale for each input. Summing thousands of
#: fp32 numbers in another order moves it by 1e-6 of that, nibbles in the wrong order most rows by more than 1e-2.
SCALE_BIAS_TOLERANCE = 1e-3

#: Scales tried for a row of 4-bit integers, as parts of the one that clips nothing.
CLIPS = tuple(1 - step / 40 for step in range(21))

#: Elements of a weight worked on at a time: its copies stay in a core's cache.
_BLOCK = 1 << 18

_CODES = Stored(torch.int8, rows=2)
_OF_ROW = Stored(torch.float32, columns=0)


def _kept(tensors: Tensors) -> Tensors:
    codes, scale, bias = tensors[".weight"], tensors[".weight_scale"].float(), tensors[".scale_bias"].float()
    # A rank whose inputs are no whole segments has read none, and works its own sum out.
    own = bias.sum(1, keepdim=True) if bias.numel() else w4a8_bias(codes, scale)
    return {"": codes, "_scale": scale, "_bias": own}


class W4A8(Format):
    name, title, folder = "w4a8", "W4A8_DYNAMIC", MODELSLIM
    parts = (
        Part(".weight", (torch.int8,), _CODES),
        *SCALES,
        Part(".scale_bias", FLOAT, ROW, segmented=True, published=torch.float32),
    )
    sign = ".scale_bias"
    kept = MappingProxyType({"": _CODES, "_scale": _OF_ROW, "_bias": _OF_ROW})
    takes = MappingProxyType({"w4a8": _kept})
    product = moe_experts_w4a8

    def values(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return w4a8_matrix(tensors[".weight"], tensors[".weight_scale"].float(), dtype)

    def fault(self, tensors: Tensors) -> str | None:
        """scale_bias is 8 * sum(weight * scale) over each segment: a wrong nibble order or scale shows there."""
        if fault := symmetry_fault(tensors):
            return fault
        found, scale = tensors[".scale_bias"].float(), tensors[".weight_scale"].float()
        if not found.numel():  # this rank's inputs are no whole segments
            return None
        codes = unpack_rows(tensors[".weight"]).unflatten(1, (found.shape[1], -1))
        unit = 8 * scale
        wanted = unit * codes.sum(-1, dtype=torch.int32)
        wrong = ~((found - wanted).abs() <= SCALE_BIAS_TOLERANCE * unit * codes.shape[-1])
        if not wrong.any():
            return None
        row, segment = wrong.nonzero()[0].tolist()
        return (
            f"scale_bias is not 8 * sum(weight * weight_scale) in {int(wrong.sum())} of {wrong.numel()} places (row "
            f"{row}, segment {segment}: {found[row, segment]:.5g} for {wanted[row, segment]:.5g}): they are not of one "
            "weight, or its 4-bit codes lie in another order than even row low, odd row high"
        )

    def quantize(self, name: str, weight: Tensor) -> Tensors:
        """To symmetric 4-bit integers with one scale a row, of CLIPS the one with the least squared error; a tie goes
        to the one that clips less."""
        rows = max(1, _BLOCK // weight.shape[1])
        blocks = [_codes_and_scale(block.float()) for block in weight.split(rows)]
        codes, scale = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
        packed = pack_rows(codes)
        shares = packed.unflatten(1, (segments_of(name, weight.shape[1]), -1)).unbind(1)
        return {
            ".weight": packed,
            ".weight_scale": scale,
            ".weight_offset": torch.zeros_like(scale),
            ".scale_bias": torch.cat([w4a8_bias(share, scale) for share in shares], dim=1),
        }

    def written(self, name: str, matrix: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]] | None:
        if found := super().written(name, matrix):
            found[".scale_bias"] = (matrix[0], segments_of(name, matrix[1])), torch.float32
        return found

    def lay_out(self, kept: Tensors, dtype: torch.dtype) -> Tensors:
        return dict(zip(self.kept, w4a8_layout(*(kept[suffix] for suffix in self.kept)), strict=True))


def segments_of(name: str, inputs: int) -> int:
    """Into how many sums the scale_bias of a weight is split: as ModelSlim does, that of down projections."""
    return SEGMENTS if name.endswith(".w2.weight") and inputs % SEGMENTS == 0 else 1


def _codes_and_scale(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [O, I] in -8..7 and fp32 [O, 1]."""
    largest = weight.abs().amax(dim=1, keepdim=True) / HIGHEST
    largest = largest.masked_fill(largest == 0, 1.0)
    best, error = largest, torch.full_like(largest, torch.inf)
    for clip in CLIPS:
        scale = largest * clip
        found = (_round(weight, scale) * scale - weight).square_().sum(dim=1, keepdim=True)
        best = torch.where(found < error, scale, best)
        error = torch.minimum(found, error)
    return _round(weight, best).to(torch.int8), best


def _round(weight: Tensor, scale: Tensor) -> Tensor:
    return torch.round(weight / scale).clamp_(LOWEST, HIGHEST)
