"""Gated activations of the MLPs and experts: SiTU (K3) and SiLU (Kimi-Linear).

No torch_npu operator computes SiTU: its gated activations are SwiGLU, plain or clamped, and clamping is not tanh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops import sgl
from kimi_k3_npu.ops.constants import constant
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import FLOATS, no_kernel, nothing_to_run, wrong_dtype
from kimi_k3_npu.ops.op import COMPOSED, operator

#: How sgl_kernel_npu calls a list of group sizes. Its other kind, running sums, makes it read one entry too far.
COUNTS = 1


@operator("situ_and_mul(Tensor gate_up, float beta, float? linear_beta) -> Tensor")
def situ_and_mul(gate_up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(u / linear_beta), or u); g | u = gate_up.

    gate_up [..., 2I], gate first; result [..., I] in its dtype, computed in fp32 (the published activation).
    """
    x = gate_up.float()
    gate, up = x.chunk(2, dim=-1)
    if linear_beta is None:
        return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(gate_up.dtype)
    limits = _limits(gate.shape[-1], beta, linear_beta, x.device)
    bounded_gate, bounded_up = (limits * torch.tanh(x / limits)).chunk(2, dim=-1)
    return (bounded_gate * torch.sigmoid(gate) * bounded_up).to(gate_up.dtype)


@constant
def _limits(width: int, beta: float, linear_beta: float, device: torch.device) -> Tensor:
    """What bounds each column of gate | up, fp32 [2I]: both halves go through the same few operations together."""
    return torch.tensor([beta, linear_beta], dtype=torch.float32, device=device).repeat_interleave(width)


def gated_activation(gate_up: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    """SiTU with the config's betas, or SiLU when `beta` is None. gate_up [..., 2I] -> [..., I]."""
    if beta is not None:
        return situ_and_mul(gate_up, beta, linear_beta)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_activation_of_groups(
    gate_up: Tensor, counts: Tensor, beta: float | None, linear_beta: float | None
) -> Tensor:
    """The same on an NPU for rows sorted by expert, gate_up [M, 2I] -> [M, I]; counts int64 [E], one an expert.

    Rows past the sum of the counts are nobody's: they hold anything before and after.
    """
    if beta is None:
        return gated_activation(gate_up, None, None)
    return situ_and_mul.npu(gate_up, beta, linear_beta, counts)


@dataclass(frozen=True)
class Situ:
    """One activation of `rows` rows on one device."""

    rows: int
    dtype: torch.dtype
    device: Device


@situ_and_mul.case(Situ)
def _case(gate_up: Tensor, beta: float, linear_beta: float | None, counts: Tensor | None = None) -> tuple:
    return gate_up.numel() // max(1, gate_up.shape[-1]), gate_up.dtype


def refuse_fused(case: Situ) -> str | None:
    """The limits of sgl_kernel_npu's situ_and_mul, which takes rows of any width in tiles, with 64-bit offsets."""
    if reason := nothing_to_run(case.device, case.rows) or no_kernel(case.device, sgl.SITU_AND_MUL):
        return reason
    return wrong_dtype("gate_up", case.dtype, FLOATS)


@situ_and_mul.kernel("sgl_situ_and_mul", refuse_fused)
def fused(gate_up: Tensor, beta: float, linear_beta: float | None, counts: Tensor | None = None) -> Tensor:
    """Both betas are always passed: the kernel's defaults are those of one model."""
    kernel = sgl.kernel(sgl.SITU_AND_MUL)
    groups = {} if counts is None else {"group_list": counts, "group_list_type": COUNTS}
    return kernel(gate_up.contiguous(), beta=beta, linear_beta=linear_beta, **groups)


@situ_and_mul.kernel(COMPOSED)
def composed(gate_up: Tensor, beta: float, linear_beta: float | None, counts: Tensor | None = None) -> Tensor:
    """Basic operators over all rows, also those past the groups: their number is known to the device only."""
    return situ_and_mul.reference(gate_up, beta, linear_beta)
