"""RMS norms. The mean of squares and the scaling are in fp32 whatever the dtype of the activations."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops.registry import define


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
