"""MXFP4, in which the experts are published: two 4-bit floats a byte, and one power of two for each 32 inputs."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.config import MXFP4_GROUP
from kimi_k3_npu.formats.format import Format, Part, Stored, Tensors, as_stored
from kimi_k3_npu.ops.experts import moe_experts_mxfp4
from kimi_k3_npu.ops.nz import mxfp4_layout
from kimi_k3_npu.ops.quant import mxfp4_dequantize, mxfp4_quantize
from kimi_k3_npu.resources import resource_path

_CODES = Stored(torch.uint8, columns=2)
_SCALE = Stored(torch.uint8, columns=MXFP4_GROUP)


class Mxfp4(Format):
    name, title, folder = "mxfp4", "MXFP4", "mxfp4"
    parts = (Part(".weight_packed", (torch.uint8,), _CODES), Part(".weight_scale", (torch.uint8,), _SCALE))
    sign = ".weight_packed"
    group = MXFP4_GROUP
    too_narrow = (torch.float16,)
    kept = MappingProxyType({"_packed": _CODES, "_scale": _SCALE})
    takes = MappingProxyType({"mxfp4": as_stored})
    product = moe_experts_mxfp4

    def values(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        return mxfp4_dequantize(tensors[".weight_packed"], tensors[".weight_scale"], dtype)

    def fault(self, tensors: Tensors) -> str | None:
        count = int((tensors[".weight_scale"] == 255).sum())
        return f"weight_scale is 255, which stands for NaN, in {count} of its groups" if count else None

    def quantize(self, name: str, weight: Tensor) -> Tensors:
        """Values that MXFP4 holds stay what they are."""
        packed, scale = mxfp4_quantize(weight)
        return {".weight_packed": packed, ".weight_scale": scale}

    def quantization_config(self) -> dict[str, Any]:
        """As the published checkpoint has it."""
        published = resource_path("weights", "manifests", "kimi-k3-config.json").read_text(encoding="utf-8")
        return json.loads(published)["text_config"]["quantization_config"]

    def lay_out(self, kept: Tensors, dtype: torch.dtype) -> Tensors:
        return {"_packed": mxfp4_layout(kept["_packed"])}
