"""The routed experts on an NPU in steps: sort rows by expert, multiply by each expert's matrix, bring the rows home.

Letters: T tokens, k experts of each, E experts held here, M = T*k rows, of which only as many are somebody's as there
are pairs of a token and an expert held here; only the device knows that number. The others hold anything, even NaN.
Limits are those of torch_npu's and CANN's pages on the operators, traps those that SGLang and vLLM-Ascend met.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import INNER_LIMIT, OFFSET_LIMIT, nothing_to_run

#: npu_moe_init_routing_v2 wants a bound of the expert ids, which it only checks against this and the range held here.
ID_BOUND = 10240
#: Groups of one npu_grouped_matmul.
MOST_GROUPS = 1024

_NO_QUANT, _DYNAMIC_QUANT = -1, 1
_COUNTS, _RUNNING_SUMS = 1, 0
_BY_ROWS, _ONE_OUTPUT = 0, 2
#: npu_moe_finalize_routing's number for nothing dropped, row t*k + j being choice j of token t.
_TOKEN_MAJOR = 2


@dataclass(frozen=True)
class Visit:
    """T tokens visiting their k experts, of which E from `first` on are here; H wide outside, I inside."""

    tokens: int
    top_k: int
    experts: int
    first: int
    width: int
    inner: int
    dtype: torch.dtype
    device: Device


class Routed(NamedTuple):
    """Rows sorted by expert, [M, H]; where choice j of token t went, int32 [M] at t*k + j, -1 if to another rank; rows
    of each expert, int64 [E]; the rows' scales, fp32 [M], if they are quantised."""

    rows: Tensor
    places: Tensor
    counts: Tensor
    scale: Tensor


def visit_of(x: Tensor, ids: Tensor, experts: int, first: int, inner: int) -> tuple:
    """The values of the case at hand: x [T, H], ids [T, k]."""
    return *ids.shape, experts, first, x.shape[1], inner, x.dtype


def owners(counts: Tensor, rows: int, first: int) -> Tensor:
    """The expert of each of `rows` rows that arrived sorted by expert, counts [E] of each from `first` on: [rows, 1].

    Rows to spare past the last expert's get the id after the last one held here: the operators refuse negative ids, and
    compute nothing for ids that are not held. No count reaches the host, and shapes do not depend on any.
    """
    place = torch.arange(rows, device=counts.device)
    local = torch.searchsorted(counts.to(torch.int64).cumsum(0), place, right=True)
    return (first + local).unsqueeze(1)


def refuse_visit(case: Visit) -> str | None:
    """What holds for experts in any format."""
    if reason := nothing_to_run(case.device, case.tokens):
        return reason
    if case.first + case.experts > ID_BOUND:
        return f"expert ids up to {case.first + case.experts - 1}, must be below {ID_BOUND}"
    if case.experts > MOST_GROUPS:
        return f"{case.experts} experts, at most {MOST_GROUPS}"
    for name, size in (("H", case.width), ("I", case.inner)):
        if size >= INNER_LIMIT:
            return f"{name} = {size}, must be below {INNER_LIMIT}"
    rows = case.tokens * case.top_k
    return f"{rows} rows, must be below 2^31" if rows >= OFFSET_LIMIT else None


def expand(x: Tensor, ids: Tensor, experts: int, first: int, *, quantize: bool = False) -> Routed:
    """Copy each token's row, x [T, H], to its experts; to int8 with `quantize`."""
    rows, places, counts, scale = torch.ops.npu.npu_moe_init_routing_v2(
        x,
        ids.to(torch.int32),
        active_num=ids.numel(),
        expert_num=ID_BOUND,
        expert_tokens_num_type=_COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[first, first + experts],
        quant_mode=_DYNAMIC_QUANT if quantize else _NO_QUANT,
        row_idx_type=0,
    )
    return Routed(rows, places, counts, scale)


def grouped_matmul(
    rows: Tensor,
    weight: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    tensors: Mapping[str, Tensor] | None = None,
    dtypes: Mapping[str, int] | None = None,
) -> Tensor:
    """Each expert's rows [m, K] of `rows` [M, K] by its matrix of `weight` [E, K, N] -> [M, N] in `dtype`.

    `tensors` are the operator's lists of one tensor each: scales, offsets, bias. `dtypes` says what bytes stand for.
    """
    # A list of one count is invalid; of one group the count is also the running sum.
    kind = _COUNTS if counts.shape[0] > 1 else _RUNNING_SUMS
    return torch.ops.npu.npu_grouped_matmul(
        [rows],
        [weight],
        group_list=counts,
        group_list_type=kind,
        group_type=_BY_ROWS,
        split_item=_ONE_OUTPUT,
        output_dtype=dtype,
        **{name: [tensor] for name, tensor in (tensors or {}).items()},
        **(dtypes or {}),
    )[0]


def combine(rows: Tensor, routed: Routed, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows: rows [M, H], weights [T, k] -> [T, H]. Overwrites a row of `rows`.

    The operator takes weights in the rows' dtype only, and no place of -1. If some choice went to another rank, the
    last row is nobody's: it is set to zero and stands for all of those. Any other row would bring one token's NaN to
    another, a weight of zero notwithstanding.
    """
    last = rows.shape[0] - 1
    rows.narrow(0, last, 1).masked_fill_(routed.counts.sum() <= last, 0)
    places = routed.places.remainder(rows.shape[0])  # -1 becomes the last
    shares = weights.to(rows.dtype)
    return torch.ops.npu.npu_moe_finalize_routing(rows, None, None, None, shares, places, None, _TOKEN_MAJOR)
