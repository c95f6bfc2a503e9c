"""Plain matrices, in a floating-point dtype."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from kimi_k3_npu.formats.format import Format, Part, Stored, Tensors
from kimi_k3_npu.ops.experts import moe_experts


class Plain(Format):
    name, title, option, folder = "plain", "plain", "bf16", "plain"
    parts = (Part(".weight"),)
    kept = MappingProxyType({"": Stored()})
    product = moe_experts

    def values(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return tensors[".weight"].to(dtype)

    def quantize(self, name: str, weight: Tensor) -> Tensors:
        return {".weight": weight.to(torch.bfloat16)}
