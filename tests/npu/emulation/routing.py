"""From router logits to experts and back: gating, sorting rows by expert, and the weighted sum of the experts' rows.

T tokens, k experts for each, E experts in all, H the width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.npu.emulation.core import Limits, emulates, undefined
from tests.npu.emulation.norm import FLOATS
from tests.npu.emulation.quant import quantize_rows

_gate = Limits("npu_moe_gating_top_k", "dtype")
_init = Limits("npu_moe_init_routing_v2")
_finalize = Limits("npu_moe_finalize_routing")
_unpermute = Limits("npu_moe_token_unpermute", "dtype")


@emulates(_gate)
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights [T, k] in x's dtype, ids int32 [T, k], all scores fp32 [T, E] if out_flag).

    Chosen by score + bias, lower id first among equals; weights are the scores without the bias. Sigmoid weights are
    always divided by their sum + eps, softmax weights never.
    """
    _gate.no(input_ids=input_ids, tid2eid=tid2eid)
    _gate(x.dim() == 2, f"x is {x.dim()}-D, must be 2-D")
    _gate(x.dtype in FLOATS, f"x is {x.dtype}, must be one of {FLOATS}", "dtype")
    experts = x.shape[1]
    _gate(experts <= 2048, f"{experts} experts, at most 2048")
    _gate(group_count > 0 and experts % group_count == 0, f"{experts} experts in {group_count} groups")
    in_group = experts // group_count
    _gate(in_group > 2, f"groups of {in_group} experts, must be more than 2")
    _gate(-(-in_group // 32) * 32 * group_count <= 2048, f"{group_count} groups of {in_group} padded to 32 exceed 2048")
    _gate(1 <= k_group <= group_count and 1 <= k <= in_group * k_group, f"{k=} of {k_group=} groups of {in_group}")
    _gate(renorm == 0, f"{renorm=}, must be 0")
    _gate(norm_type in (0, 1) and group_select_mode in (0, 1), f"{norm_type=}, {group_select_mode=}, must be 0 or 1")
    if bias is not None:
        _gate(bias.shape == (experts,), f"bias is {list(bias.shape)}, must be [{experts}]")
        _gate(bias.dtype == x.dtype, f"bias is {bias.dtype}, must be x's {x.dtype}")

    scores = x.float().sigmoid() if norm_type == 1 else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if k_group < group_count:
        groups = choice.unflatten(1, (group_count, in_group))
        best = groups.topk(2).values.sum(-1) if group_select_mode else groups.amax(-1)
        kept = best.sort(dim=1, descending=True, stable=True).indices[:, :k_group]
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        choice = groups.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, ids)
    if norm_type == 1:
        weights = weights / (weights.sum(1, keepdim=True) + eps)
    weights = (weights * routed_scaling_factor).to(x.dtype)
    return weights, ids.to(torch.int32), scores if out_flag else undefined(tuple(x.shape), torch.float32)


@emulates(_init)
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = -1,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows sorted by expert [T*k, H], row indices int32 [T*k], counts int64 [e1 - e0], scales fp32 [T*k]).

    Only rows of experts in the range [e0, e1) are written; the rest is undefined. Row index t*k + j says where choice
    j of token t lies (row_idx_type 0, -1 for experts outside the range), or which t*k + j lies in row i (type 1).
    """
    _init.no(offset=offset, x_dtype=x_dtype)
    floats = (*FLOATS, torch.int8)
    _init(x.dim() == 2 and x.dtype in floats, f"x is {x.dim()}-D {x.dtype}, must be 2-D, one of {floats}")
    fits = expert_idx.dtype == torch.int32 and expert_idx.dim() == 2 and expert_idx.shape[0] == x.shape[0]
    _init(fits, f"expert_idx is {expert_idx.dtype} {list(expert_idx.shape)}, must be int32 [{x.shape[0]}, k]")
    _init(drop_pad_mode == 0, f"{drop_pad_mode=}, must be 0")
    _init(expert_tokens_num_flag, "expert_tokens_num_flag must be True")
    _init(expert_tokens_num_type == 1, f"{expert_tokens_num_type=}; 1 (counts) is emulated, 2 is the only other")
    _init(quant_mode in (-1, 1), f"{quant_mode=}, must be -1 or 1")
    _init(x.dtype != torch.int8 or quant_mode == -1, "int8 rows cannot be quantised again")
    _init(row_idx_type in (0, 1), f"{row_idx_type=}, must be 0 or 1")
    _init(0 < expert_num <= 10240, f"{expert_num=}, must be in 1..10240")
    first, last = active_expert_range or (0, expert_num)
    _init(0 <= first < last <= expert_num, f"range {[first, last]} of {expert_num} experts")
    _init(bool(((expert_idx >= 0) & (expert_idx < expert_num)).all()), f"expert ids must be in 0..{expert_num - 1}")
    entries = expert_idx.numel()
    _init(active_num in (-1, 0, entries), f"{active_num=}; all {entries} rows are emulated")

    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    order = order[(flat[order] >= first) & (flat[order] < last)]
    valid = order.numel()
    rows = x[order // expert_idx.shape[1]]
    scales = undefined((entries,), torch.float32)
    if quant_mode == 1:
        wide = rows.float()
        if scale is not None:
            shape = (last - first, x.shape[1])
            _init(scale.shape == shape and scale.dtype == torch.float32, f"scale must be fp32 {list(shape)}")
            wide = wide * scale[flat[order] - first]
        rows, scales[:valid] = quantize_rows(wide)
    else:
        _init.no(scale=scale)
    expanded = undefined((entries, x.shape[1]), rows.dtype)
    expanded[:valid] = rows

    if row_idx_type == 0:
        index = torch.full((entries,), -1, dtype=torch.int32)
        index[order] = torch.arange(valid, dtype=torch.int32)
    else:
        index = undefined((entries,), torch.int32)
        index[:valid] = order.to(torch.int32)
    counts = torch.bincount(flat[order] - first, minlength=last - first)
    return expanded, index, counts, scales


@emulates(_finalize)
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """skip1 + skip2 + sum_j scales[t, j] * (row of choice j of token t + bias of its expert), [T, H] in the rows'
    dtype.

    The row of choice j is index j*T + t in mode 0, as the first init_routing numbers them, and t*k + j in mode 2, as
    its second version does.
    """
    rows, index = expanded_permuted_rows, expanded_src_to_dst_row
    _finalize(rows.dim() == 2 and rows.dtype in FLOATS, f"rows are {rows.dim()}-D {rows.dtype}")
    _finalize(index.dtype == torch.int32 and index.dim() == 1, f"row indices are {index.dtype} {list(index.shape)}")
    _finalize(drop_pad_mode in (0, 2), f"{drop_pad_mode=}, must be 0 or 2 without dropping")
    _finalize(skip2 is None or skip1 is not None, "skip2 needs skip1")
    choices = scales.shape[1] if scales is not None else k
    _finalize(choices is not None and choices >= 1 and index.numel() % choices == 0, f"{index.numel()} rows for {k=}")
    tokens = index.numel() // choices
    shapes = {"skip1": (skip1, (tokens, rows.shape[1])), "skip2": (skip2, (tokens, rows.shape[1]))}
    shapes["scales"] = (scales, (tokens, choices))
    for name, (tensor, shape) in shapes.items():
        if tensor is not None:
            _finalize(tensor.shape == shape, f"{name} is {list(tensor.shape)}, must be {list(shape)}")
            _finalize(tensor.dtype == rows.dtype, f"{name} is {tensor.dtype}, must be the rows' {rows.dtype}")
    _check_range(_finalize, index, rows.shape[0])

    position = index.long().view(choices, tokens).T if drop_pad_mode == 0 else index.long().view(tokens, choices)
    terms = rows.float()[position]
    if bias is not None:
        _finalize(export_for_source_row is not None, "bias needs export_for_source_row")
        terms = terms + bias.float()[export_for_source_row.long()]
    if scales is not None:
        terms = terms * scales.float().unsqueeze(-1)
    total = terms.sum(1)
    for skip in (skip1, skip2):
        total = total if skip is None else total + skip.float()
    return total.to(rows.dtype)


@emulates(_unpermute)
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """sum_j probs[t, j] * permuted_tokens[sorted_indices[t*k + j]], [T, H] in the rows' dtype."""
    rows = permuted_tokens
    _unpermute(not padded_mode, "padded_mode must be False")
    _unpermute(rows.dim() == 2 and sorted_indices.dim() == 1, "rows must be 2-D and indices 1-D")
    _unpermute(rows.dtype == torch.bfloat16, f"rows are {rows.dtype}, must be bfloat16", "dtype")
    _unpermute(sorted_indices.dtype in (torch.int32, torch.int64), f"indices are {sorted_indices.dtype}")
    _check_range(_unpermute, sorted_indices, rows.shape[0])
    if probs is None:
        return rows[sorted_indices.long()]
    fits = probs.dim() == 2 and probs.numel() == sorted_indices.numel()
    _unpermute(fits, f"probs {list(probs.shape)} for {sorted_indices.numel()} indices")
    _unpermute(probs.dtype == rows.dtype, f"probs are {probs.dtype}, must be the rows' {rows.dtype}")
    terms = rows.float()[sorted_indices.long().view(probs.shape)]
    return (terms * probs.float().unsqueeze(-1)).sum(1).to(rows.dtype)


def _check_range(limits: Limits, index: Tensor, rows: int) -> None:
    limits(bool(((index >= 0) & (index < rows)).all()), f"row indices must be in 0..{rows - 1}")
