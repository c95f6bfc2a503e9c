"""RMS norms. The mean of squares and the scaling are in fp32 whatever the dtype of the activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import FLOATS, nothing_to_run, wrong_dtype
from kimi_k3_npu.ops.op import operator


@operator("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension; x [..., d], weight [d], result in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@operator("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, both [..., d] in x's dtype."""
    total = x + residual
    return F.rms_norm(total.float(), weight.shape, weight.float(), eps).to(x.dtype), total


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate), in fp32 until the end; x and gate [..., d] or alike, result in gate's dtype."""
    return (rms_norm(x.float(), weight, eps) * gate.float().sigmoid()).to(gate.dtype)


@dataclass(frozen=True)
class Norm:
    """One norm over the last dimension of `shape`, on one device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: Device


@rms_norm.case(Norm)
def _case(x: Tensor, weight: Tensor, eps: float) -> tuple:
    return x.shape, x.dtype, weight.dtype


@add_rms_norm.case(Norm)
def _add_case(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple:
    return x.shape, x.dtype, weight.dtype


def refuse_fused(case: Norm) -> str | None:
    """The limits of npu_rms_norm and npu_add_rms_norm (torch_npu's page on npu_rms_norm)."""
    if reason := nothing_to_run(case.device, rows=min(case.shape)):
        return reason
    if not 2 <= len(case.shape) <= 8:
        return f"x has {len(case.shape)} dimensions, must have 2 to 8"
    if case.weight_dtype != case.dtype:
        return f"weight is {case.weight_dtype}, must be x's {case.dtype}"
    return wrong_dtype("x", case.dtype, FLOATS)


@rms_norm.kernel("npu_rms_norm", refuse_fused, schemas.RMS_NORM)
def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


@add_rms_norm.kernel("npu_add_rms_norm", refuse_fused, schemas.ADD_RMS_NORM)
def fused_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return y, total
