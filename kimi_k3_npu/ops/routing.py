"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k3_npu.ops.registry import define


@define(
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
    the published code. Returns weights [T, k] fp32 and ids [T, k] int64.
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
    return weights * scaling, ids
