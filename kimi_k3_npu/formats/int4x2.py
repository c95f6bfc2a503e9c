"""int4x2, this project's own: MXFP4's values on hardware without 4-bit floats, as sums of two 4-bit integers under one
scale for each 32 inputs.

Matrices are transposed, eight integers a word, in one order in files and in another that a device's products may want.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.config import MXFP4_GROUP, OWN_QUANT_METHOD
from kimi_k3_npu.formats.format import Format, Part, Stored, Tensors, as_stored
from kimi_k3_npu.ops.experts_int4 import (
    int4_group_matrix,
    int4_layout,
    moe_experts_int4_group,
    prepare_mxfp4_as_int4,
)
from kimi_k3_npu.ops.quant import mxfp4_quantize

_CODES = Stored(torch.int32, rows=8, transposed=True)
_SCALE = Stored(torch.bfloat16, columns=MXFP4_GROUP, transposed=True)


def _of_mxfp4(packed: Tensor, scale: Tensor) -> Tensors:
    """What a rank keeps of an MXFP4 matrix, u8 [O, I/2] and u8 [O, I/32]."""
    (first, second), halves = prepare_mxfp4_as_int4(packed.unsqueeze(0), scale.unsqueeze(0), torch.bfloat16)
    return {"_first": first[0], "_second": second[0], "_scale": halves[0]}


class Int4x2(Format):
    name, title, folder = "int4x2", "int4x2", "int4x2"
    parts = (
        Part(".weight_first", (torch.int32,), _CODES),
        Part(".weight_second", (torch.int32,), _CODES),
        Part(".weight_scale", (torch.bfloat16,), _SCALE),
    )
    sign = ".weight_first"
    group = MXFP4_GROUP
    too_narrow = (torch.float16,)
    kept = MappingProxyType({"_first": _CODES, "_second": _CODES, "_scale": _SCALE})
    takes = MappingProxyType(
        {
            "int4x2": as_stored,
            "mxfp4": lambda tensors: _of_mxfp4(tensors[".weight_packed"], tensors[".weight_scale"]),
        }
    )
    product = moe_experts_int4_group

    def values(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        halves = [tensors[".weight_first"], tensors[".weight_second"]]
        return int4_group_matrix(halves, tensors[".weight_scale"], dtype)

    def quantize(self, name: str, weight: Tensor) -> Tensors:
        """To MXFP4, written as pairs of integers."""
        return {f".weight{suffix}": tensor for suffix, tensor in _of_mxfp4(*mxfp4_quantize(weight)).items()}

    def quantization_config(self) -> dict[str, Any]:
        return {"quant_method": OWN_QUANT_METHOD, "format": self.name, "group_size": self.group}

    def lay_out(self, kept: Tensors, dtype: torch.dtype) -> Tensors:
        return {suffix: int4_layout(kept[suffix], dtype) for suffix in ("_first", "_second")}
