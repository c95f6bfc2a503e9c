"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import nothing_to_run
from kimi_k3_npu.ops.op import operator

#: The fused operator sorts at most this many scores of a token, each group padded to a multiple of 32.
MOST_EXPERTS = 2048
SORTED_TOGETHER = 32

_SIGMOID = 1


@operator(
    "route(Tensor logits, Tensor bias, int top_k, int num_groups, int topk_group, bool renormalize, float scaling, "
    "bool sigmoid) -> (Tensor, Tensor)"
)
def route(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    num_groups: int,
    topk_group: int,
    renormalize: bool,
    scaling: float,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """Pick `top_k` experts by score + bias; weigh them by score alone.

    logits [T, E] fp32, bias [E] fp32. Scores are the sigmoid of the logits, or their softmax. With groups, only the
    `topk_group` groups with the largest sum of their two best take part; the experts of the others count as 0, as in
    the published code. Returns weights [T, k] fp32 and ids [T, k] int32, a token's experts in any order.
    """
    scores = logits.sigmoid() if sigmoid else logits.softmax(dim=-1)
    choice = scores + bias
    if num_groups > 1:
        grouped = choice.unflatten(-1, (num_groups, -1))  # [T, G, E/G]
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = group_scores.topk(topk_group, dim=-1, sorted=False).indices
        allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
        choice = grouped.masked_fill(~allowed.unsqueeze(-1), 0.0).flatten(-2)
    ids = choice.topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * scaling, ids.to(torch.int32)


@dataclass(frozen=True)
class Routing:
    """One routing of `tokens` tokens over `experts` experts on one device."""

    tokens: int
    experts: int
    top_k: int
    num_groups: int
    topk_group: int
    renormalize: bool
    sigmoid: bool
    dtype: torch.dtype
    device: Device


@route.case(Routing)
def _case(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    num_groups: int,
    topk_group: int,
    renormalize: bool,
    scaling: float,
    sigmoid: bool,
) -> tuple:
    return *logits.shape, top_k, num_groups, topk_group, renormalize, sigmoid, logits.dtype


def refuse_fused(case: Routing) -> str | None:
    """The limits of npu_moe_gating_top_k (torch_npu's page), and where it computes something else."""
    if reason := nothing_to_run(case.device, case.tokens):
        return reason
    if case.dtype != torch.float32:
        return f"logits are {case.dtype}, must be float32 as the bias is"
    if not case.sigmoid:
        return "scores are a softmax, which it never renormalises"
    if not case.renormalize or case.top_k == 1:
        return "it always divides sigmoid scores by their sum"
    if case.topk_group < case.num_groups:
        return "it ranks the experts of a masked group below all others, here they count as 0"
    padded = -(-case.experts // SORTED_TOGETHER) * SORTED_TOGETHER
    if not 2 < case.experts <= padded <= MOST_EXPERTS:
        return f"{case.experts} experts, must be 3 to {MOST_EXPERTS}"
    if not 1 <= case.top_k <= case.experts:
        return f"top_k = {case.top_k} of {case.experts} experts"
    return None


@route.kernel("npu_moe_gating_top_k", refuse_fused, schemas.GATING_TOP_K)
def fused(
    logits: Tensor,
    bias: Tensor,
    top_k: int,
    num_groups: int,
    topk_group: int,
    renormalize: bool,
    scaling: float,
    sigmoid: bool,
) -> tuple[Tensor, Tensor]:
    """All groups take part (see `refuse_fused`), so the operator sees one group."""
    options = {"renorm": 0, "norm_type": _SIGMOID, "routed_scaling_factor": scaling, "eps": 1e-20}
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(logits, top_k, bias=bias, **options)
    return weights, ids
