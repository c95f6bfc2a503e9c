"""W8A8 as ModelSlim stores it (W8A8_DYNAMIC): int8 matrices with one scale a row, for linear layers.

Activations are rounded to int8 by its name, which is up to what multiplies. This package expands it while it loads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.formats.format import FLOAT, Format, Part, Stored, Tensors

#: The folders that hold these formats, each tensor's named in a description beside them.
MODELSLIM = "modelslim"

ROW = Stored(columns=0)
#: What follows every matrix that ModelSlim has quantised.
SCALES = (
    Part(".weight_scale", FLOAT, ROW, published=torch.float32),
    Part(".weight_offset", FLOAT, ROW, published=torch.float32),
)


def symmetry_fault(tensors: Tensors) -> str | None:
    if count := int(tensors[".weight_offset"].count_nonzero()):
        return f"weight_offset is not 0 in {count} rows, but symmetric codes have no offset"
    if count := int((tensors[".weight_scale"] < 0).sum()):
        return f"weight_scale is negative in {count} rows"
    return None


class W8A8(Format):
    name, title, folder = "w8a8", "W8A8_DYNAMIC", MODELSLIM
    parts = (Part(".weight", (torch.int8,)), *SCALES)
    sign = ".weight_offset"

    def values(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return (tensors[".weight"] * tensors[".weight_scale"].float()).to(dtype)

    def fault(self, tensors: Tensors) -> str | None:
        return symmetry_fault(tensors)
