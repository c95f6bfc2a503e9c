"""npu_grouped_matmul in the forms that experts take: plain, W8A8, W4A8, W4A16 by group, MXFP4 weights with MXFP8 rows.

E experts of this rank, M rows sorted by expert, K and N the sizes of one product. Only "one x, one weight, one output"
(group_type 0, split_item 2 or 3) is emulated. Rows past the last group are left undefined, as on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import current
from tests.npu.emulation.core import FLOAT4_E2M1, FLOAT8_E8M0, Limits, dtype_of, emulates, undefined
from tests.npu.emulation.weights import decode_e2m1, decode_e8m0, nibble_order, nz_tiles, unpack_int4

_gmm = Limits("npu_grouped_matmul", "dtype")

_HALVES = (torch.float16, torch.bfloat16)

#: From an expert and its rows to their product.
Product = Callable[[int, slice], Tensor]


@dataclass
class _Call:
    """The tensors of one call, taken out of their lists."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    antiquant_scale: Tensor | None
    antiquant_offset: Tensor | None
    per_token_scale: Tensor | None
    out: torch.dtype

    def only(self, form: str, *names: str) -> None:
        """Refuse quantisation tensors that this form does not take, and miss none that it needs."""
        for name in ("scale", "antiquant_scale", "antiquant_offset", "per_token_scale"):
            given = getattr(self, name) is not None
            _gmm(given == (name in names), f"{form} {'does not take' if given else 'needs'} {name}")


@emulates(_gmm)
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    antiquant_scale: Sequence[Tensor] | None = None,
    antiquant_offset: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: int | None = None,
    weight_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
    **others: object,
) -> list[Tensor]:
    """[x's rows of expert e @ weight[e] for each e] in one tensor [M, N]; see the forms below."""
    _gmm.no(**others)
    _gmm(group_type == 0 and split_item in (2, 3), f"{group_type=}, {split_item=}: only 0 and 2 or 3 are emulated")
    _gmm(act_type == 0, f"{act_type=}, must be 0")
    lists = (x, weight, bias, scale, antiquant_scale, antiquant_offset, per_token_scale)
    _gmm(all(tensors is None or len(tensors) == 1 for tensors in lists), "lists must hold one tensor")
    first = [None if tensors is None else tensors[0] for tensors in lists]
    call = _Call(*first, out=dtype_of(output_dtype, x[0].dtype))
    rows, form = call.x, _form(call, weight_dtype, per_token_scale_dtype)
    _gmm(rows.dim() == 2 and rows.is_contiguous(), "x must be 2-D and contiguous (x transposed is not supported)")
    _gmm(rows.shape[0] > 0, "x has no rows")
    _gmm(call.weight.dim() == 3, f"weight is {call.weight.dim()}-D, must be 3-D")

    # For int8 rows by int4 weights the list is read as counts, whatever group_list_type says.
    sizes = _group_sizes(group_list, 1 if form is _w4a8 else group_list_type, call.weight.shape[0], rows.shape[0])
    product, N = form(call)
    y = undefined((rows.shape[0], N), call.out)
    start = 0
    for expert, size in enumerate(sizes):
        part = slice(start, start + size)
        y[part] = product(expert, part).to(call.out)
        start += size
    return [y]


def _form(
    call: _Call, weight_dtype: int | None, per_token_scale_dtype: int | None
) -> Callable[[_Call], tuple[Product, int]]:
    dtypes = (call.x.dtype, call.weight.dtype)
    if dtypes == (torch.float8_e4m3fn, torch.uint8):
        _gmm(weight_dtype == FLOAT4_E2M1, f"{weight_dtype=}, must be float4_e2m1fn_x2 ({FLOAT4_E2M1})")
        _gmm(per_token_scale_dtype == FLOAT8_E8M0, f"{per_token_scale_dtype=}, must be float8_e8m0fnu ({FLOAT8_E8M0})")
        return _mxfp4
    _gmm.no(weight_dtype=weight_dtype, per_token_scale_dtype=per_token_scale_dtype)
    if dtypes == (torch.int8, torch.int32):
        return _w4a8
    if dtypes == (torch.int8, torch.int8):
        return _w8a8
    if call.weight.dtype == torch.int32:
        return _w4a16
    _gmm(dtypes[0] == dtypes[1] and call.x.dtype in (*_HALVES, torch.float32), f"dtypes {dtypes}")
    return _plain


def _group_sizes(group_list: Tensor | None, kind: int | None, experts: int, rows: int) -> list[int]:
    _gmm(group_list is not None and group_list.dtype == torch.int64, "group_list must be an int64 tensor")
    _gmm(group_list.shape == (experts,), f"group_list {list(group_list.shape)} for {experts} experts")
    _gmm(experts <= 1024, f"{experts} groups, at most 1024")
    _gmm(kind in (0, 1), f"group_list_type={kind}, must be 0 or 1")
    if kind == 1:
        _gmm(experts != 1, "a list of counts must not have length 1")
        sizes = group_list
    else:
        sizes = torch.diff(group_list, prepend=group_list.new_zeros(1))
    _gmm(bool((sizes >= 0).all()), f"group_list {group_list.tolist()} has a negative group")
    _gmm(int(sizes.sum()) <= rows, f"group_list sums to {int(sizes.sum())}, x has {rows} rows")
    return sizes.tolist()


def _check_sizes(call: _Call, K: int, N: int) -> None:
    transposed = _is_transposed(call.weight)
    _gmm(transposed or call.weight.is_contiguous(), "weight must be contiguous or the transpose of what is")
    _gmm(call.x.shape[1] == K, f"x has {call.x.shape[1]} columns, weight has K = {K}")
    inner = K if transposed else N
    _gmm(max(K, inner) < 65536, f"last dimensions {K} of x and {inner} of weight, must be below 65536")


def _is_transposed(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.transpose(1, 2).is_contiguous()


def _check_bias(call: _Call, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if call.bias is not None:
        _gmm(call.bias.dtype == dtype, f"bias is {call.bias.dtype}, must be {dtype}")
        _gmm(call.bias.shape == shape, f"bias is {list(call.bias.shape)}, must be {list(shape)}")


def _plain(call: _Call) -> tuple[Product, int]:
    """x [M, K] @ w [E, K, N] + bias [E, N], all of one floating dtype; the bias of bf16 is fp32."""
    call.only("a plain product")
    E, K, N = call.weight.shape
    _check_sizes(call, K, N)
    _gmm(call.out == call.x.dtype, f"output is {call.out}, must be x's {call.x.dtype}")
    _check_bias(call, torch.float16 if call.out == torch.float16 else torch.float32, (E, N))

    def product(e: int, rows: slice) -> Tensor:
        y = call.x[rows].float() @ call.weight[e].float()
        return y if call.bias is None else y + call.bias[e].float()

    return product, N


def _w8a8(call: _Call) -> tuple[Product, int]:
    """(x int8 @ w int8 [E, K, N] + bias int32 [E, N]) * scale [E, N] * per_token_scale fp32 [M]."""
    call.only("W8A8", "scale", "per_token_scale")
    E, K, N = call.weight.shape
    _check_sizes(call, K, N)
    scale, per_token = _scales(call, (E, N))
    wanted = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}.get(call.out)
    _gmm(scale.dtype == wanted, f"scale is {scale.dtype} for output {call.out}, must be {wanted}", "dtype")
    _check_bias(call, torch.int32, (E, N))

    def product(e: int, rows: slice) -> Tensor:
        total = call.x[rows].double() @ call.weight[e].double()
        if call.bias is not None:
            total = total + call.bias[e]
        return total.float() * scale[e].float() * per_token[rows, None]

    return product, N


def _w4a8(call: _Call) -> tuple[Product, int]:
    """((x - 8) @ (w * scale) + bias) * per_token_scale: int8 x, int4 w in int32 [E, K, N/8], by channel.

    The kernel splits x into 16*hi + lo and feeds hi and lo - 8 to the int4 unit, so the bias has to hold 8 * sum_k w *
    scale. The scale is an int64 whose low half is the bit pattern of an fp32.
    """
    _gmm(current().soc != "a5", "int64 scales and the bias of 8 * sum(w * scale) are for A2 and A3")
    call.only("W4A8", "scale", "per_token_scale")
    tiles = nz_tiles(call.weight)
    _gmm(tiles is None or tiles[0] == torch.int8, f"weight was cast to NZ as {tiles}; cast it as int8, then view it")
    _gmm(call.weight.is_contiguous(), "a transposed int4 weight is not supported")
    E, K, packed = call.weight.shape
    N = packed * 8
    _check_sizes(call, K, N)
    _gmm(K <= 18432, f"K = {K}, must be at most 18432")
    _gmm(call.out in _HALVES, f"output {call.out}, must be float16 or bfloat16", "dtype")
    scale, per_token = _scales(call, (E, 1, N))
    _gmm(scale.dtype == torch.int64, f"scale is {scale.dtype}, must be int64 with the bits of an fp32")
    _gmm(bool((scale >> 32 == 0).all()), "the high half of the scale must be 0")
    _gmm(call.bias is not None, "W4A8 needs the bias of 8 * sum(w * scale)")
    _check_bias(call, torch.float32, (E, N))
    channel = scale.to(torch.int32).view(torch.float32)

    def product(e: int, rows: slice) -> Tensor:
        total = (call.x[rows].double() - 8) @ unpack_int4(call.weight[e]).double()  # exact
        return (total.float() * channel[e] + call.bias[e]) * per_token[rows, None]

    return product, N


def _scales(call: _Call, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    scale, per_token = call.scale, call.per_token_scale
    _gmm(scale.shape == shape, f"scale is {list(scale.shape)}, must be {list(shape)}")
    rows = call.x.shape[0]
    fits = per_token.dtype == torch.float32 and per_token.shape == (rows,)
    _gmm(fits, f"per_token_scale is {per_token.dtype} {list(per_token.shape)}, must be fp32 [{rows}]")
    return scale, per_token


def _w4a16(call: _Call) -> tuple[Product, int]:
    """x @ ((w + offset) * scale) + bias: int4 w in int32 [E, K, N/8]; scale, offset [E, groups, N] in x's dtype."""
    call.only("W4A16", "antiquant_scale", "antiquant_offset")
    _gmm(call.x.dtype in _HALVES, f"x is {call.x.dtype}, must be float16 or bfloat16", "dtype")
    _gmm(nz_tiles(call.weight) is None, "an int4 weight must stay ND")
    _gmm(call.weight.is_contiguous(), "a transposed int4 weight is not emulated")
    E, K, packed = call.weight.shape
    N = packed * 8
    _check_sizes(call, K, N)
    scale, offset = call.antiquant_scale, call.antiquant_offset
    _gmm(scale.dtype == offset.dtype == call.x.dtype == call.out, "scale, offset and output must have x's dtype")
    _gmm(scale.shape == offset.shape, f"offset {list(offset.shape)} must have the shape of scale {list(scale.shape)}")
    fits = scale.dim() == 3 and scale.shape[0] == E and scale.shape[2] == N
    _gmm(fits, f"antiquant_scale {list(scale.shape)}, must be [{E}, groups, {N}]")
    groups = scale.shape[1]
    _gmm(K % groups == 0, f"K = {K} must be divisible by the number of groups {groups}")
    _gmm(not bool(offset.any()), "an offset by group must be zero")
    _check_bias(call, torch.float16 if call.x.dtype == torch.float16 else torch.float32, (E, N))

    def product(e: int, rows: slice) -> Tensor:
        w = unpack_int4(call.weight[e], nibble_order).float() * scale[e].float().repeat_interleave(K // groups, 0)
        y = call.x[rows].float() @ w
        return y if call.bias is None else y + call.bias[e].float()

    return product, N


def _mxfp4(call: _Call) -> tuple[Product, int]:
    """e4m3 x with e8m0 per_token_scale [M, K/64, 2], fp4 w with e8m0 antiquant_scale [E, K/64, N, 2].

    The weight is uint8 [E, N, K/2] in NZ, seen as [E, K/2, N]; its scale is seen through the same transposition.
    """
    _gmm.soc("a5")
    call.only("MXFP4", "antiquant_scale", "per_token_scale")
    tiles = nz_tiles(call.weight)
    _gmm(tiles is not None and tiles[1], "an MXFP4 weight must have been cast to NZ as float4_e2m1fn_x2")
    _gmm(_is_transposed(call.weight), "an MXFP4 weight must be transposed: a view of [E, N, K/2]")
    E, packed, N = call.weight.shape
    K = packed * 2
    _check_sizes(call, K, N)
    _gmm(K % 64 == 0, f"K = {K}, must be a multiple of 64")
    _gmm(call.bias is None, "MXFP4 takes no bias here")
    _gmm(call.out == torch.bfloat16, f"output {call.out}, must be bfloat16", "dtype")
    scale, per_token = call.antiquant_scale, call.per_token_scale
    _gmm(scale.shape == (E, K // 64, N, 2), f"antiquant_scale is {list(scale.shape)}, must be {[E, K // 64, N, 2]}")
    _gmm(_is_transposed(scale), "the scale of a transposed weight must be transposed: a view of [E, N, K/64, 2]")
    rows = (call.x.shape[0], K // 64, 2)
    _gmm(per_token.shape == rows, f"per_token_scale is {list(per_token.shape)}, must be {list(rows)}")
    _gmm(scale.dtype == per_token.dtype == torch.uint8, "scales must be e8m0 in uint8")

    def product(e: int, rows: slice) -> Tensor:
        w = decode_e2m1(call.weight[e].T) * decode_e8m0(scale[e].transpose(0, 1).flatten(1)).repeat_interleave(32, 1)
        x = call.x[rows].float() * decode_e8m0(per_token[rows].flatten(1)).repeat_interleave(32, 1)
        return x @ w.T

    return product, N
