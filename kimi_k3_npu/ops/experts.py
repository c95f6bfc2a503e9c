"""The routed experts: each token visits its top-k experts, and their outputs are summed with the router's weights.

Letters: T tokens, k experts per token, E experts held here (ids first_expert .. first_expert + E), H width of their
input and output, I width inside. w13 stacks gate and up rows, gate first; ids of experts held elsewhere contribute
nothing.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_k3_npu.compat import is_compiling
from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.device import Device, current
from kimi_k3_npu.ops.grouped import Visit, combine, expand, grouped_matmul, refuse_visit, visit_of
from kimi_k3_npu.ops.limits import FLOATS, wrong_dtype
from kimi_k3_npu.ops.nz import is_nz
from kimi_k3_npu.ops.op import Kernel, Op
from kimi_k3_npu.ops.quant import mxfp4_dequantize
from kimi_k3_npu.ops.situ import gated_activation, gated_activation_of_groups

#: Rows of the smallest full tile of the CPU's matrix products.
ROWS = 4
#: With so few tokens, products are bound by reading the matrices.
FEW_TOKENS = 16
#: Scales of MX formats come in pairs, one for each 32 elements.
MX_PAIR = 64


class ExpertCall(NamedTuple):
    """What every operator of experts is called with, whatever the format of the matrices.

    x [T, H], weights fp32 [T, k], ids [T, k]; w13 and w2 are the tensors that hold the matrices [E, 2I, H] and
    [E, H, I] in a format, `laid_out` says whether they lie as a device wants them. beta and linear_beta are SiTU's;
    beta None means SiLU. The result is [T, H] in x's dtype.
    """

    x: Tensor
    weights: Tensor
    ids: Tensor
    w13: Sequence[Tensor]
    w2: Sequence[Tensor]
    laid_out: bool
    first_expert: int
    beta: float | None
    linear_beta: float | None

    def activation(self, gate_up: Tensor) -> Tensor:
        """gate_up [m, 2I] -> [m, I]."""
        return gated_activation(gate_up, self.beta, self.linear_beta)

    def activation_of_groups(self, gate_up: Tensor, counts: Tensor) -> Tensor:
        """The same on an NPU for rows that are sorted by expert."""
        return gated_activation_of_groups(gate_up, counts, self.beta, self.linear_beta)


class ExpertsOp(Op):
    """An operator of experts in one format; its reference and its kernels take an `ExpertCall`."""

    def __init__(self, name: str, reference: Callable[[ExpertCall], Tensor]) -> None:
        schema = (
            f"{name}(Tensor x, Tensor weights, Tensor ids, Tensor[] w13, Tensor[] w2, bool laid_out, int first_expert, "
            "float? beta, float? linear_beta) -> Tensor"
        )
        super().__init__(schema, _spread(reference))

    def add(self, kernel: Kernel) -> None:
        super().add(replace(kernel, launch=_spread(kernel.launch)))


def experts_operator(name: str) -> Callable[[Callable[[ExpertCall], Tensor]], ExpertsOp]:
    """Declare the operator `name` with the decorated function of an `ExpertCall` as its reference."""
    return lambda reference: ExpertsOp(name, reference)


def _spread(function: Callable[[ExpertCall], Tensor]) -> Callable[..., Tensor]:
    """A function of an operator's arguments, as PyTorch calls it."""
    return functools.wraps(function)(lambda *arguments: function(ExpertCall(*arguments)))


@experts_operator("moe_experts")
def moe_experts(call: ExpertCall) -> Tensor:
    """Plain matrices, [w13] and [w2]. The weighted sum is in fp32."""
    x, weights, ids, (w13,), (w2,), _, first, beta, linear_beta = call
    few = x.shape[0] <= FEW_TOKENS and ids.numel() >= w13.shape[0]
    if few or is_compiling():  # a graph's shapes cannot depend on where the tokens go
        held = (ids >= first) & (ids < first + w13.shape[0])
        places = torch.where(held, ids - first, 0)
        visits = (_every_expert if few else _element_wise)(x, places, w13, w2, beta, linear_beta)
        return _add_up(visits.masked_fill(~held.unsqueeze(-1), 0.0), weights, x.dtype)
    return by_expert(call, w13.shape[0], lambda e: (w13[e], w2[e]))


@experts_operator("moe_experts_mxfp4")
def moe_experts_mxfp4(call: ExpertCall) -> Tensor:
    """Packed MXFP4 matrices, each hit expert expanded to x's dtype while it is used.

    Of each: packed u8 [E, N, K/2], scale u8 [E, N, K/32].
    """
    dtype = call.x.dtype

    def matrices(e: int) -> Iterator[Tensor]:
        return (mxfp4_dequantize(packed[e], scale[e], dtype) for packed, scale in (call.w13, call.w2))

    return by_expert(call, call.w13[0].shape[0], matrices)


def by_expert(call: ExpertCall, count: int, matrices: Callable[[int], Iterable[Tensor]]) -> Tensor:
    """Sort the token-expert pairs by expert, run each hit expert once on its rows, and sum per token in fp32.

    `matrices` gives w13 [2I, H] and w2 [H, I] of one of the `count` experts held here.

    Matrix libraries take odd numbers of rows through other kernels, which round differently. In a batch an expert's
    rows are therefore filled up to a multiple of ROWS, so that no token's result depends on where the others went.
    """
    x, weights, ids, first = call.x, call.weights, call.ids, call.first_expert

    def expert(e: int, rows: Tensor) -> Tensor:
        w13, w2 = matrices(e)
        return call.activation(rows @ w13.t()) @ w2.t()

    if x.shape[0] == 1:
        return _one_token(x, weights[0], ids[0].tolist(), first, count, expert)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    edges = torch.arange(first, first + count + 1, dtype=ids.dtype, device=ids.device)
    bounds = torch.searchsorted(flat[order], edges)  # [E + 1]
    start, *_, end = bounds.tolist()
    order = order[start:end]
    if not order.shape[0]:
        return torch.zeros_like(x)
    hits = bounds.diff()  # [E]
    filled = -(hits // -ROWS) * ROWS
    ends = filled.cumsum(0)
    shift = (ends - filled - bounds[:-1] + start).repeat_interleave(hits)
    places = torch.arange(order.shape[0], device=x.device) + shift
    borders = [0, *ends.tolist()]

    sources = order.new_zeros(borders[-1]).index_copy(0, places, order // ids.shape[1])
    rows = x.index_select(0, sources)  # filled up with copies of token 0's
    outputs = [expert(e, rows[a:b]) for e, (a, b) in enumerate(pairwise(borders)) if b > a]
    nothing = x.new_zeros(1, x.shape[1])  # what a token gets from experts held elsewhere
    where = torch.full_like(flat, borders[-1]).index_copy(0, order, places.to(flat.dtype))
    visits = torch.cat([*outputs, nothing]).index_select(0, where).float().unflatten(0, ids.shape)
    return _add_up(visits, weights, x.dtype)


def _add_up(visits: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """visits fp32 [T, k, H] by their weights [T, k] -> [T, H] in `dtype`."""
    return torch.bmm(weights.unsqueeze(1), visits).squeeze(1).to(dtype)


def _every_expert(
    x: Tensor, places: Tensor, w13: Tensor, w2: Tensor, beta: float | None, linear_beta: float | None
) -> Tensor:
    """What each token gets from the experts at its places [T, k], fp32 [T, k, H], by two products of all experts with
    all tokens. Reading the matrices is what takes time with few tokens, and with as many visits as experts most are
    read anyway (of few held of many, more than need be)."""
    inner = gated_activation(x @ w13.transpose(1, 2), beta, linear_beta)  # [E, T, I]
    outputs = (inner @ w2.transpose(1, 2)).float()  # [E, T, H]
    rows = places * x.shape[0] + torch.arange(x.shape[0], device=x.device).unsqueeze(1)  # [T, k], of [E T, H]
    return outputs.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, places.shape)


def _element_wise(
    x: Tensor, places: Tensor, w13: Tensor, w2: Tensor, beta: float | None, linear_beta: float | None
) -> Tensor:
    """The same by sums over elements, which a compiler turns into loops over the matrices where they lie."""
    gate_up = (w13[places].float() * x[:, None, None].float()).sum(-1).to(x.dtype)  # [T, k, 2I]
    inner = gated_activation(gate_up, beta, linear_beta)
    return (w2[places].float() * inner.unsqueeze(-2).float()).sum(-1)


def _one_token(
    x: Tensor, weights: Tensor, ids: Sequence[int], first: int, count: int, expert: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """`by_expert` of x [1, H], weights [k]: nothing to sort and nothing to fill up."""
    held = [(choice, e - first) for choice, e in enumerate(ids) if first <= e < first + count]
    if not held:
        return torch.zeros_like(x)
    outputs = torch.cat([expert(e, x) for _, e in held]).float()  # [k held here, H]
    shares = weights if len(held) == len(ids) else weights[[choice for choice, _ in held]]
    return (shares @ outputs).unsqueeze(0).to(x.dtype)


@dataclass(frozen=True)
class Mxfp4Visit:
    """A visit of experts in MXFP4; `nz` says whether their packed matrices lie in NZ."""

    visit: Visit
    nz: bool

    @property
    def device(self) -> Device:
        return self.visit.device


def _mxfp4_visit(*values: Any) -> Mxfp4Visit:
    *visit, nz, device = values
    return Mxfp4Visit(Visit(*(*visit, device)), nz)


@moe_experts.case(Visit)
def _plain_case(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], laid_out: bool, *rest: Any
) -> tuple:
    return visit_of(x, ids, w13[0].shape[0], rest[0], w2[0].shape[2])


@moe_experts_mxfp4.case(_mxfp4_visit)
def _mxfp4_case(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], laid_out: bool, *rest: Any
) -> tuple:
    nz = current().soc == "a5" and is_nz(w13[0]) and is_nz(w2[0])
    return *visit_of(x, ids, w13[0].shape[0], rest[0], 2 * w2[0].shape[2]), nz


def refuse_grouped(case: Visit) -> str | None:
    """The limits of npu_grouped_matmul on plain matrices."""
    return refuse_visit(case) or wrong_dtype("x", case.dtype, FLOATS)


@moe_experts.kernel("grouped_matmul", refuse_grouped, schemas.EXPERTS)
def grouped(call: ExpertCall) -> Tensor:
    """Matrices are passed as transposed views, which the operator knows from other strides."""
    return by_groups(call, lambda rows, matrix, counts: grouped_matmul(rows, matrix[0].mT, counts, rows.dtype))


def by_groups(call: ExpertCall, multiply: Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]) -> Tensor:
    """Experts on an NPU: rows sorted by expert [M, H], `multiply` by the matrices of w13 and of w2 given how many rows
    each expert has, and brought home."""
    routed = expand(call.x, call.ids, call.w13[0].shape[0], call.first_expert)
    inner = call.activation_of_groups(multiply(routed.rows, call.w13, routed.counts), routed.counts)
    return combine(multiply(inner, call.w2, routed.counts), routed, call.weights)


def refuse_grouped_mxfp4(case: Mxfp4Visit) -> str | None:
    """The limits of npu_grouped_matmul on e4m3 rows and e2m1 matrices."""
    if reason := refuse_visit(case.visit):
        return reason
    if case.visit.device.soc != "a5":
        return f"{case.visit.device.soc} has no FP4 hardware"
    if reason := wrong_dtype("x", case.visit.dtype, (torch.bfloat16,)):
        return reason
    for name, size in (("H", case.visit.width), ("I", case.visit.inner)):
        if size % MX_PAIR:
            return f"{name} = {size}, must be a multiple of {MX_PAIR}"
    return None if case.nz else "the packed matrices do not lie in NZ; pass them through nz.as_nz after loading"


@moe_experts_mxfp4.kernel("grouped_matmul_mxfp4", refuse_grouped_mxfp4, schemas.EXPERTS_MXFP4)
def grouped_mxfp4(call: ExpertCall) -> Tensor:
    """MXFP4 matrices by rows that are rounded to MXFP8 before each product."""
    return by_groups(call, _mx_matmul)


def _mx_matmul(rows: Tensor, matrix: Sequence[Tensor], counts: Tensor) -> Tensor:
    """rows bf16 [M, K], of the matrix packed u8 [E, N, K/2] and scale u8 [E, N, K/32] -> bf16 [M, N].

    Matrix and scales must be seen through the same transposition, as views. The scales of the matrix go where those of
    a weight-only format go, antiquant_scale. x_dtype stays out: torch_npu's shape function refuses e4m3 there.
    """
    packed, scale = matrix
    torch_npu = importlib.import_module("torch_npu")
    codes, row_scale = torch.ops.npu.npu_dynamic_mx_quant(rows, dst_type=torch.float8_e4m3fn)
    return grouped_matmul(
        codes,
        packed.transpose(1, 2),
        counts,
        rows.dtype,
        {
            "antiquant_scale": scale.unflatten(2, (-1, 2)).transpose(1, 2),
            "per_token_scale": row_scale,
        },  # [E, K/64, N, 2]
        {"weight_dtype": torch_npu.float4_e2m1fn_x2, "per_token_scale_dtype": torch_npu.float8_e8m0fnu},
    )
