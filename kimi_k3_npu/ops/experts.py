"""The routed experts: each token visits its top-k experts, and their outputs are summed with the router's weights.

Letters: T tokens, k experts per token, E experts held here (ids first_expert .. first_expert + E), H width of their
input and output, I width inside. w13 stacks gate and up rows, gate first; ids of experts held elsewhere contribute
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from kimi_k3_npu.ops.quant import mxfp4_dequantize
from kimi_k3_npu.ops.registry import define
from kimi_k3_npu.ops.situ import gated_activation


@define(
    "moe_experts(Tensor x, Tensor weights, Tensor ids, Tensor w13, Tensor w2, int first_expert, float? beta, "
    "float? linear_beta) -> Tensor"
)
def moe_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w2: Tensor,
    first_expert: int,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """x [T, H], weights fp32 [T, k], ids [T, k], w13 [E, 2I, H], w2 [E, H, I] -> [T, H] in x's dtype.

    beta and linear_beta are SiTU's; beta None means SiLU. The weighted sum is in fp32.
    """

    def expert(e: int, rows: Tensor) -> Tensor:
        return gated_activation(rows @ w13[e].t(), beta, linear_beta) @ w2[e].t()

    return _by_expert(x, weights, ids, first_expert, w13.shape[0], expert)


@define(
    "moe_experts_mxfp4(Tensor x, Tensor weights, Tensor ids, Tensor w13_packed, Tensor w13_scale, Tensor w2_packed, "
    "Tensor w2_scale, int first_expert, float? beta, float? linear_beta) -> Tensor"
)
def moe_experts_mxfp4(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13_packed: Tensor,
    w13_scale: Tensor,
    w2_packed: Tensor,
    w2_scale: Tensor,
    first_expert: int,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """`moe_experts` on packed MXFP4 weights, each hit expert expanded to x's dtype while it is used.

    w13_packed u8 [E, 2I, H/2], w13_scale u8 [E, 2I, H/32], w2_packed u8 [E, H, I/2], w2_scale u8 [E, H, I/32].
    """

    def expert(e: int, rows: Tensor) -> Tensor:
        w13 = mxfp4_dequantize(w13_packed[e], w13_scale[e], rows.dtype)
        w2 = mxfp4_dequantize(w2_packed[e], w2_scale[e], rows.dtype)
        return gated_activation(rows @ w13.t(), beta, linear_beta) @ w2.t()

    return _by_expert(x, weights, ids, first_expert, w13_packed.shape[0], expert)


def _by_expert(
    x: Tensor, weights: Tensor, ids: Tensor, first: int, count: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Sort the token-expert pairs by expert, run each hit expert once on its rows, and sum per token in fp32."""
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    sorted_ids = ids.flatten()[order]
    bounds = torch.searchsorted(sorted_ids, torch.arange(first, first + count + 1, device=ids.device)).tolist()
    tokens = (order // top_k)[bounds[0] : bounds[-1]]
    rows = x[tokens]
    outputs = [
        expert(e, rows[start - bounds[0] : end - bounds[0]])
        for e, (start, end) in enumerate(pairwise(bounds))
        if end > start
    ]
    total = x.float().new_zeros(x.shape)
    if outputs:
        shares = weights.flatten()[order[bounds[0] : bounds[-1]]].unsqueeze(-1)
        total = total.index_add(0, tokens, torch.cat(outputs).float() * shares)
    return total.to(x.dtype)
