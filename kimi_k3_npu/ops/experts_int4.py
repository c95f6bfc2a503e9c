"""The routed experts with 4-bit integer weights, in two formats, each as published and as an NPU reads it.

Letters as in `ops.experts`; of one matrix, [N, K] is its published shape (N outputs, K inputs) and C the parts that a
published correction is split into.

- W4A8 (ModelSlim's W4A8_DYNAMIC): one scale an output; rows are rounded to int8 while they are used.
- Grouped int4 (W4A16): one scale for each 32 inputs. A matrix is the sum of two under the same scales, which holds
  every MXFP4 value exactly: twice it is an integer in -12..12, a sum of two nibbles. It is kept transposed and packed
  by `int4.pack_columns`; an NPU's products want its nibbles in an order of their own.

What the layout of W4A8 is shows in shapes and dtypes, so its reference takes both layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.constants import constant
from kimi_k3_npu.ops.device import Device, current
from kimi_k3_npu.ops.experts import ExpertCall, by_expert, by_groups, experts_operator
from kimi_k3_npu.ops.grouped import Visit, combine, expand, grouped_matmul, refuse_visit, visit_of
from kimi_k3_npu.ops.int4 import (
    HIGHEST,
    LOWEST,
    pack_columns,
    rows_to_columns,
    unpack_columns,
    unpack_rows,
)
from kimi_k3_npu.ops.limits import HALVES, no_operator, wrong_dtype
from kimi_k3_npu.ops.nz import as_nz
from kimi_k3_npu.ops.op import operator
from kimi_k3_npu.ops.quant import E2M1

#: Inputs that share a scale in the grouped format.
GROUP = 32
#: K of a W4A8 product.
MOST_INPUTS = 18432


@experts_operator("moe_experts_w4a8")
def moe_experts_w4a8(call: ExpertCall) -> Tensor:
    """W4A8 matrices, here each expanded while it is used and with rows as they are.

    Of each, published: int8 [E, N/2, K] (two outputs a byte), scale fp32 [E, N, 1], bias fp32 [E, N, C]; or what
    `prepare_w4a8` makes of the three. The bias is no part of the function: it corrects how an NPU multiplies.
    """
    dtype = call.x.dtype

    def matrices(e: int) -> Iterator[Tensor]:
        return (w4a8_matrix(codes[e], scale[e], dtype) for codes, scale, _ in (call.w13, call.w2))

    return by_expert(call, call.w13[0].shape[0], matrices)


@experts_operator("moe_experts_int4_group")
def moe_experts_int4_group(call: ExpertCall) -> Tensor:
    """Grouped int4 matrices, here each expanded while it is used.

    Of each: int32 [E, K, N/8], one or several to be added, as `pack_columns` packs them, and scale [E, K/32, N].

    Raises:
        LaunchError: They have been laid out for an NPU's products, in an order that only those know.
    """
    dtype = call.x.dtype
    if call.laid_out and call.x.shape[0]:
        raise LaunchError(
            "int4 experts lie as an NPU's products take them, which this device or dtype cannot read; load the model "
            "again where and as it is to run"
        )

    def matrices(e: int) -> Iterator[Tensor]:
        return (
            int4_group_matrix([part[e] for part in codes], scale[e], dtype) for *codes, scale in (call.w13, call.w2)
        )

    return by_expert(call, call.w13[-1].shape[0], matrices)


def w4a8_matrix(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A published or prepared W4A8 matrix, expanded to [N, K]."""
    if codes.dtype == torch.int8:
        return (unpack_rows(codes) * scale).to(dtype)
    return (unpack_columns(codes) * scale.to(torch.int32).view(torch.float32)).t().to(dtype)


def int4_group_matrix(codes: Sequence[Tensor], scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A grouped int4 matrix, int32 [K, N/8] each and scale [K/32, N], expanded to [N, K]."""
    values = torch.stack([unpack_columns(part) for part in codes]).sum(0)
    return (values.unflatten(0, (-1, GROUP)) * scale.float().unsqueeze(1)).flatten(0, 1).t().to(dtype)


def w4a8_bias(codes: Tensor, scale: Tensor) -> Tensor:
    """8 * sum over K of a published matrix, fp32 [E, N, 1], for a checkpoint that lacks it or to check one that has it.

    An NPU splits an int8 of a row into nibbles and feeds 16 * high + (low - 8) to its int4 unit: 8 less than it should.
    """
    return 8 * unpack_rows(codes).sum(dim=-1, keepdim=True) * scale


def prepare_w4a8(codes: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Published int8 [E, N/2, K], fp32 [E, N, 1], fp32 [E, N, C] -> int32 [E, K, N/8], int64 [E, 1, N], fp32 [E, N].

    The cast to NZ comes before the view as int32: a tile of int8 is byte for byte a tile of int4, one of int32 is not.
    A scale is the bit pattern of its fp32 in the low half of an int64.
    """
    columns = as_nz(rows_to_columns(codes), False).view(torch.int32)
    bits = scale.transpose(1, 2).contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return columns, bits, bias.sum(dim=-1)


@operator("w4a8_layout(Tensor codes, Tensor scale, Tensor bias) -> (Tensor, Tensor, Tensor)")
def w4a8_layout(codes: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Published W4A8 matrices as this device's products take them: here the three tensors themselves."""
    return codes, scale, bias


@w4a8_layout.layout
def w4a8_layout_npu(codes: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By `prepare_w4a8`, but not on an A5, whose product wants them otherwise. What is prepared stays what it is."""
    if current().soc == "a5" or codes.dtype == torch.int32:
        return codes, scale, bias
    return prepare_w4a8(codes, scale, bias)


@operator("int4_layout(Tensor codes, ScalarType dtype) -> Tensor")
def int4_layout(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 [E, K, N/8] from `pack_columns` as this device multiplies rows of `dtype` by them: here `codes` itself."""
    return codes


@int4_layout.layout
def int4_layout_npu(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """By torch_npu's own packing, whose page leaves the order of the nibbles to the operator; `codes` itself where
    there is no product to read them: `refuse_int4`, and an older torch_npu."""
    device = current()
    if device.soc == "a5" or dtype not in HALVES or no_operator(device, schemas.EXPERTS_INT4):
        return codes
    packed = torch.empty_like(codes)
    for place, matrix in zip(packed, codes, strict=True):  # one by one: what is packed is eight times as large
        place.copy_(torch.ops.npu.npu_convert_weight_to_int4pack(unpack_columns(matrix).to(torch.int32)))
    return packed


def prepare_mxfp4_as_int4(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """MXFP4 u8 [E, N, K/2], u8 [E, N, K/32] -> two int32 [E, K, N/8] and their scale [E, K/32, N], half of MXFP4's.

    The first holds as much of twice the value as a nibble can, so the second is mostly zero and never of the other
    sign: adding up their products cancels nothing.
    """
    doubled = torch.tensor([int(2 * value) for value in E2M1], dtype=torch.int8, device=packed.device)
    parts: tuple[list[Tensor], list[Tensor]] = ([], [])
    for matrix in packed:
        nibbles = torch.stack([matrix & 0xF, matrix >> 4], dim=-1).flatten(-2)  # [N, K]
        values = doubled[nibbles.int()].t()
        first = values.clamp(LOWEST, HIGHEST)
        for part, codes in zip(parts, (first, values - first), strict=True):
            part.append(pack_columns(codes.contiguous()))
    halves = torch.exp2(scale.float() - 128).masked_fill(scale == 255, torch.nan)
    return [torch.stack(part) for part in parts], halves.transpose(1, 2).to(dtype).contiguous()


@dataclass(frozen=True)
class Int4Visit:
    """A visit of experts in a 4-bit format; `prepared` says whether their tensors are laid out for the NPU."""

    visit: Visit
    prepared: bool

    @property
    def device(self) -> Device:
        return self.visit.device


def _int4_visit(*values: Any) -> Int4Visit:
    *visit, prepared, device = values
    return Int4Visit(Visit(*(*visit, device)), prepared)


@moe_experts_w4a8.case(_int4_visit)
def _w4a8_case(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], laid_out: bool, *rest: Any
) -> tuple:
    experts, rows, columns = w13[1].shape  # prepared [E, 1, 2I], published [E, 2I, 1]
    prepared = w13[0].dtype == w2[0].dtype == torch.int32
    return *visit_of(x, ids, experts, rest[0], rows * columns // 2), prepared


@moe_experts_int4_group.case(_int4_visit)
def _int4_group_case(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Sequence[Tensor], w2: Sequence[Tensor], laid_out: bool, *rest: Any
) -> tuple:
    experts, groups, _ = w2[-1].shape
    return *visit_of(x, ids, experts, rest[0], GROUP * groups), laid_out


def refuse_int4(case: Int4Visit) -> str | None:
    """What holds for both formats."""
    if reason := refuse_visit(case.visit) or wrong_dtype("x", case.visit.dtype, HALVES):
        return reason
    if case.visit.device.soc == "a5":
        return "its weights are laid out for a2 and a3"
    return None if case.prepared else "the weights are as published, they must be prepared after loading"


def refuse_w4a8(case: Int4Visit) -> str | None:
    """The limits of npu_grouped_matmul on int8 rows and int4 matrices."""
    if case.visit.experts == 1:
        return "one expert: it reads a list of counts whatever it is told, and such a list must not have length 1"
    for name, size in (("H", case.visit.width), ("I", case.visit.inner)):
        if size > MOST_INPUTS:
            return f"{name} = {size}, must be at most {MOST_INPUTS}"
    return refuse_int4(case)


@moe_experts_w4a8.kernel("grouped_matmul_w4a8", refuse_w4a8, schemas.EXPERTS_W4A8)
def w4a8(call: ExpertCall) -> Tensor:
    """Rows are rounded to int8, each with its own scale, on the way to the experts and between the two products."""
    (w13, w13_scale, w13_bias), (w2, w2_scale, w2_bias), dtype = call.w13, call.w2, call.x.dtype
    routed = expand(call.x, call.ids, w13.shape[0], call.first_expert, quantize=True)
    scales = {"scale": w13_scale, "bias": w13_bias, "per_token_scale": routed.scale}
    gate_up = grouped_matmul(routed.rows, w13, routed.counts, dtype, scales)
    inner, inner_scale = torch.ops.npu.npu_dynamic_quant(call.activation_of_groups(gate_up, routed.counts))
    scales = {"scale": w2_scale, "bias": w2_bias, "per_token_scale": inner_scale}
    return combine(grouped_matmul(inner, w2, routed.counts, dtype, scales), routed, call.weights)


@moe_experts_int4_group.kernel("grouped_matmul_int4", refuse_int4, schemas.EXPERTS_INT4)
def int4_group(call: ExpertCall) -> Tensor:
    """Rows stay as they are; a matrix that is a sum of two is two products."""
    return by_groups(call, _int4_matmul)


def _int4_matmul(rows: Tensor, matrix: Sequence[Tensor], counts: Tensor) -> Tensor:
    *parts, scale = matrix
    scale = scale.to(rows.dtype)
    scales = {"antiquant_scale": scale, "antiquant_offset": zeros(tuple(scale.shape), scale.dtype, scale.device)}
    products = [grouped_matmul(rows, codes, counts, rows.dtype, scales) for codes in parts]
    return products[0] if len(products) == 1 else products[0].add_(products[1])


@constant
def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Offsets of a format that has none, which the operator wants all the same."""
    return torch.zeros(shape, dtype=dtype, device=device)
