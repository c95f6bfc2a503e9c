"""Packed 4-bit integers: two's complement nibbles, -8..7, in the orders that checkpoints and documented operators use.

    along rows      int8 [..., N/2, K]: byte (i, k) holds rows 2i (low nibble) and 2i + 1 of column k    (ModelSlim)
    along columns   int32 [..., K, N/8]: bits 4j..4j+3 hold column 8i + j                       (W4A8's product, int4x2)

Bytes are little endian, so the nibbles of an int32 are those of its bytes in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST, HIGHEST = -8, 7


def unpack_rows(packed: Tensor) -> Tensor:
    """int8 [..., N/2, K] -> int8 [..., N, K]."""
    return torch.stack(_nibbles(packed), dim=-2).flatten(-3, -2)


def pack_rows(codes: Tensor) -> Tensor:
    """int8 [..., N, K] -> int8 [..., N/2, K]."""
    low, high = codes.unflatten(-2, (-1, 2)).unbind(-2)
    return _byte(low, high)


def unpack_columns(packed: Tensor) -> Tensor:
    """int32 [..., K, N/8] -> int8 [..., K, N]."""
    return torch.stack(_nibbles(packed.contiguous().view(torch.int8)), dim=-1).flatten(-2)


def pack_columns(codes: Tensor) -> Tensor:
    """int8 [..., K, N] -> int32 [..., K, N/8]."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return _byte(low, high).view(torch.int32)


def rows_to_columns(packed: Tensor) -> Tensor:
    """int8 [..., N/2, K] along rows -> int8 [..., K, N/2] along columns: a transposition, no nibble moves."""
    return packed.transpose(-1, -2).contiguous()


def _nibbles(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The signed low and high nibbles of int8 bytes."""
    return (packed << 4) >> 4, packed >> 4


def _byte(low: Tensor, high: Tensor) -> Tensor:
    return (low & 0xF) | (high << 4)
