"""Linear layers with int8 weights, and the rounding of activations to int8 that they need (W8A8_DYNAMIC).

O outputs, I inputs, as in torch: y = x @ W.T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import HALVES, INNER_LIMIT, nothing_to_run, wrong_dtype
from kimi_k3_npu.ops.nz import as_nz
from kimi_k3_npu.ops.op import operator

#: Of int8 codes, symmetric.
LARGEST = 127


@operator("dynamic_quant_int8(Tensor x) -> (Tensor, Tensor)")
def dynamic_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to int8 by its own scale: x [..., d] -> codes int8 [..., d], scale fp32 [...] = max|row| / 127.

    Ties go to even. A row of zeros has scale 0.
    """
    rows = x.float()
    scale = rows.abs().amax(dim=-1) / LARGEST
    codes = torch.round(rows / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return codes.to(torch.int8), scale


@operator("w8a8_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
def w8a8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., I] by weight int8 [O, I], scale fp32 [O, 1] or [O], bias fp32 [O] -> [..., O] in x's dtype.

    The weight may have any strides; `prepare_w8a8` gives it those that an NPU reads fastest. x stays as it is here.
    """
    expanded = weight * scale.float().view(-1, 1)
    return F.linear(x.float(), expanded, bias).to(x.dtype)


def prepare_w8a8(weight: Tensor) -> Tensor:
    """The same int8 [O, I], in memory [I, O] and on an NPU in NZ."""
    return as_nz(weight.t().contiguous(), False).t()


@dataclass(frozen=True)
class Rows:
    """`rows` rows of `width` elements to round, on one device."""

    rows: int
    dims: int
    dtype: torch.dtype
    device: Device


@dataclass(frozen=True)
class Linear:
    """One linear layer on one device."""

    rows: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    scale_dtype: torch.dtype
    device: Device


@dynamic_quant_int8.case(Rows)
def _rows(x: Tensor) -> tuple:
    return x.numel() // max(1, x.shape[-1]), x.dim(), x.dtype


@w8a8_linear.case(Linear)
def _linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> tuple:
    outputs, inputs = weight.shape
    return x.numel() // inputs, inputs, outputs, x.dtype, scale.dtype


def refuse_dynamic_quant(case: Rows) -> str | None:
    """The limits of npu_dynamic_quant (torch_npu's page)."""
    if reason := nothing_to_run(case.device, case.rows):
        return reason
    if case.dims < 2:
        return f"x has {case.dims} dimension, must have 2 or more"
    return wrong_dtype("x", case.dtype, HALVES)


def refuse_w8a8(case: Linear) -> str | None:
    """The limits of npu_quant_matmul (torch_npu's page) for rows with a scale each, and of npu_dynamic_quant."""
    if reason := nothing_to_run(case.device, case.rows) or wrong_dtype("x", case.dtype, HALVES):
        return reason
    for name, size in (("I", case.inputs), ("O", case.outputs)):
        if size >= INNER_LIMIT:
            return f"{name} = {size}, must be below {INNER_LIMIT}; shard or split the layer"
    return wrong_dtype("scale", case.scale_dtype, (torch.float32,))


@dynamic_quant_int8.kernel("npu_dynamic_quant", refuse_dynamic_quant, schemas.DYNAMIC_QUANT)
def fused_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch.ops.npu.npu_dynamic_quant(x)
    return codes, scale


@w8a8_linear.kernel("npu_quant_matmul", refuse_w8a8, schemas.W8A8)
def fused_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The operator wants 2-D rows. Scales stay fp32: bfloat16 ones would be off by up to 0.2 %."""
    codes, row_scale = torch.ops.npu.npu_dynamic_quant(x.reshape(-1, x.shape[-1]))
    options = {"pertoken_scale": row_scale, "bias": bias, "output_dtype": x.dtype}
    y = torch.ops.npu.npu_quant_matmul(codes, weight.t(), scale.flatten(), **options)
    return y.unflatten(0, x.shape[:-1])
