"""Gated activations of the MLPs and experts: SiTU (K3) and SiLU (Kimi-Linear)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops.registry import define


@define("situ_and_mul(Tensor gate_up, float beta, float? linear_beta) -> Tensor")
def situ_and_mul(gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(u / linear_beta), or u); g | u = gate_up.

    gate_up [..., 2I], gate first; result [..., I] in its dtype, computed in fp32 (the published activation).
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (activated * up).to(gate_up.dtype)


def gated_activation(gate_up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """SiTU with the config's betas, or SiLU when `beta` is None. gate_up [..., 2I] -> [..., I]."""
    if beta is not None:
        return situ_and_mul(gate_up, beta, linear_beta)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
