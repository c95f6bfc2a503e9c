"""Quantise a weight into the tensors of a stored form."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.checkpoint.forms import INT4X2, MXFP4, SEGMENTS, W4A8, Form, Tensors
from kimi_k3_npu.ops.experts_int4 import w4a8_bias
from kimi_k3_npu.ops.int4 import HIGHEST, LOWEST, pack_rows
from kimi_k3_npu.ops.quant import mxfp4_quantize

#: Scales tried for a row of 4-bit integers, as parts of the one that clips nothing.
CLIPS = tuple(1 - step / 40 for step in range(21))

#: Elements of a weight worked on at a time: its copies stay in a core's cache.
_BLOCK = 1 << 18


def quantize_mxfp4(weight: Tensor) -> Tensors:
    """A float weight [O, I] to MXFP4. Values that MXFP4 holds stay what they are."""
    packed, scale = mxfp4_quantize(weight)
    return {".weight_packed": packed, ".weight_scale": scale}


def quantize_int4x2(weight: Tensor) -> Tensors:
    """A float weight [O, I] to MXFP4, written as pairs of 4-bit integers."""
    halves = MXFP4.kept["int4x2"](quantize_mxfp4(weight))
    return {f".weight{name}": tensor for name, tensor in halves.items()}


def quantize_w4a8(weight: Tensor, segments: int = 1) -> Tensors:
    """A float weight [O, I] to symmetric 4-bit integers with one scale a row, of CLIPS the one with the least squared
    error; a tie goes to the one that clips less.

    `segments` is the number of sums that scale_bias is split into.
    """
    rows = max(1, _BLOCK // weight.shape[1])
    blocks = [_codes_and_scale(block.float()) for block in weight.split(rows)]
    codes, scale = (torch.cat(tensors) for tensors in zip(*blocks, strict=True))
    packed = pack_rows(codes)
    shares = packed.unflatten(1, (segments, -1)).unbind(1)
    return {
        ".weight": packed,
        ".weight_scale": scale,
        ".weight_offset": torch.zeros_like(scale),
        ".scale_bias": torch.cat([w4a8_bias(share, scale) for share in shares], dim=1),
    }


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


def quantize(form: Form, name: str, weight: Tensor) -> Tensors:
    """The float `weight` [O, I] called `name` in the tensors of `form`. Raises ValueError for NaN and infinity."""
    if form is W4A8:
        return quantize_w4a8(weight, segments_of(name, weight.shape[1]))
    return {MXFP4: quantize_mxfp4, INT4X2: quantize_int4x2}[form](weight)


def segments_of(name: str, inputs: int) -> int:
    """Into how many sums the scale_bias of a weight is split: as ModelSlim does, that of down projections."""
    return SEGMENTS if name.endswith(".w2.weight") and inputs % SEGMENTS == 0 else 1
