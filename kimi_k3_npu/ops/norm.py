"""RMS norms. The mean of squares and the scaling are in fp32 whatever the dtype of the activations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops.device import Device, current
from kimi_k3_npu.ops.limits import FLOATS, nothing_to_run, takes_anything, wrong_dtype
from kimi_k3_npu.ops.registry import define, npu_kernel, reference
from kimi_k3_npu.ops.select import Candidate, Choice, choose


@define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension; x [..., d], weight [d], result in x's dtype."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


@define("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
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


@npu_kernel("rms_norm")
def rms_norm_npu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` on an NPU, by the kernel that `choose_rms_norm` chooses."""
    return choose_rms_norm(_case(x, weight)).run(x, weight, eps)


@npu_kernel("add_rms_norm")
def add_rms_norm_npu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` on an NPU, by the kernel that `choose_add_rms_norm` chooses."""
    return choose_add_rms_norm(_case(x, weight)).run(x, residual, weight, eps)


def choose_rms_norm(case: Norm) -> Choice:
    return choose("rms_norm", RMS_NORM, case)


def choose_add_rms_norm(case: Norm) -> Choice:
    return choose("add_rms_norm", ADD_RMS_NORM, case)


def _case(x: Tensor, weight: Tensor) -> Norm:
    return Norm(tuple(x.shape), x.dtype, weight.dtype, current())


def refuse_fused(case: Norm) -> str | None:
    """The limits of npu_rms_norm and npu_add_rms_norm (torch_npu's page on npu_rms_norm)."""
    if reason := nothing_to_run(case.device, rows=min(case.shape)):
        return reason
    if not 2 <= len(case.shape) <= 8:
        return f"x has {len(case.shape)} dimensions, must have 2 to 8"
    if case.weight_dtype != case.dtype:
        return f"weight is {case.weight_dtype}, must be x's {case.dtype}"
    return wrong_dtype("x", case.dtype, FLOATS)


def fused(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.npu.npu_rms_norm(x, weight, eps)[0]


def fused_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
    return y, total


#: In order of preference.
RMS_NORM: tuple[Candidate[Norm], ...] = (
    Candidate("npu_rms_norm", refuse_fused, fused),
    Candidate("composed", takes_anything, reference("rms_norm")),
)
ADD_RMS_NORM: tuple[Candidate[Norm], ...] = (
    Candidate("npu_add_rms_norm", refuse_fused, fused_add),
    Candidate("composed", takes_anything, reference("add_rms_norm")),
)
