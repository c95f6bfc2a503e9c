"""Dynamic quantisation of activations, and the dense matmuls over quantised operands."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.npu.emulation.core import FLOAT4_E2M1, Limits, dtype_of, emulates
from tests.npu.emulation.weights import nibble_order, unpack_int4

_dynamic = Limits("npu_dynamic_quant", "dtype")
_mx = Limits("npu_dynamic_mx_quant")
_dense = Limits("npu_quant_matmul", "dtype")
_weight_only = Limits("npu_weight_quant_batchmatmul", "dtype")

# Largest exponent and largest value of the element types.
_E4M3 = (8, 448.0)
_E2M1 = (2, 6.0)


@emulates(_dynamic)
def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(int8 [..., d], fp32 scale [...]) with scale = max|row| / 127; a row of zeros has scale 0."""
    _dynamic.no(group_index=group_index)
    _dynamic(input.dim() > 1, f"{input.dim()}-D, must have more than one dimension")
    _dynamic(input.dtype in (torch.float16, torch.bfloat16), f"{input.dtype}, must be float16 or bfloat16", "dtype")
    _dynamic(dtype_of(dst_type, torch.int8) == torch.int8, f"dst_type={dst_type}, must be int8")
    _dynamic(quant_mode == "pertoken" and dst_type_max == 0, f"{quant_mode=}, {dst_type_max=}, must be left alone")
    x = input.float()
    if smooth_scales is not None:
        _dynamic(smooth_scales.shape == input.shape[-1:], "smooth_scales must be 1-D, one for each channel")
        _dynamic(smooth_scales.dtype == input.dtype, "smooth_scales must have x's dtype", "dtype")
        x = x * smooth_scales.float()
    return quantize_rows(x)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [..., d] -> (int8 [..., d], fp32 scale [...]), symmetric, rounded half to even."""
    scale = x.abs().amax(-1) / 127
    q = torch.round(x / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
    return q.clamp(-128, 127).to(torch.int8), scale


@emulates(_mx)
def npu_dynamic_mx_quant(
    input: Tensor,
    *,
    axis: int = -1,
    round_mode: str = "rint",
    dst_type: int = FLOAT4_E2M1,
    block_size: int = 32,
    scale_alg: int | None = 0,
    dst_type_max: float = 0.0,
    max_low_bound: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Blocks of 32 along the last axis: (e4m3 [..., d], or fp4 in uint8 [..., d/2]; e8m0 in uint8 [..., d/64, 2])."""
    _mx.soc("a5")
    _mx(axis in (-1, input.dim() - 1), f"{axis=} is not emulated, only the last")
    _mx(block_size == 32 and not scale_alg and not dst_type_max and not max_low_bound, "only the defaults are emulated")
    _mx(round_mode == "rint", f"{round_mode=}, must be rint for fp8 and is emulated for fp4")
    floats = (torch.float16, torch.bfloat16, torch.float32)
    _mx(input.dtype in floats and 1 <= input.dim() <= 7, f"{input.dim()}-D {input.dtype}")
    size = input.shape[-1]
    fp4 = dst_type == FLOAT4_E2M1
    _mx(fp4 or dtype_of(dst_type) == torch.float8_e4m3fn, f"{dst_type=} is not emulated, only e4m3 and e2m1")
    _mx(not fp4 or size % 2 == 0, f"last dimension {size}, must be even for fp4")

    largest_exponent, largest = _E2M1 if fp4 else _E4M3
    blocks = torch.nn.functional.pad(input.float(), (0, -size % 64)).unflatten(-1, (-1, 32))
    # OCP MX: the exponent of the block's maximum, less that of the largest element.
    exponent = torch.frexp(blocks.abs().amax(-1)).exponent - 1 - largest_exponent
    exponent = torch.where(blocks.abs().amax(-1) == 0, -127, exponent).clamp(-127, 127)
    scaled = (blocks * torch.exp2(-exponent.float()).unsqueeze(-1)).clamp(-largest, largest)
    scaled = scaled.flatten(-2)[..., :size]
    scale = (exponent + 127).to(torch.uint8).unflatten(-1, (-1, 2))
    return (_encode_e2m1(scaled) if fp4 else scaled.to(torch.float8_e4m3fn)), scale


def _encode_e2m1(x: Tensor) -> Tensor:
    """fp32 [..., n] in -6..6 -> uint8 [..., n/2], to nearest, ties to the even code."""
    # Between codes i and i+1; an exact tie belongs to the even one, which bucketize decides by the side it counts.
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below = torch.bucketize(x.abs(), middles)
    above = torch.bucketize(x.abs(), middles, right=True)
    code = torch.where(below % 2 == 0, below, above).to(torch.uint8) | (x.signbit().to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


@emulates(_dense)
def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **others: object,
) -> Tensor:
    """int8 [M, K] by int8 [K, N]: (sum + int32 bias) * scale * pertoken_scale + float bias."""
    _dense.no(offset=offset, **others)
    out = dtype_of(output_dtype, torch.int8)
    _dense(x1.dim() == 2 and x2.dim() == 2, f"{x1.dim()}-D by {x2.dim()}-D; 2-D by 2-D is emulated")
    _dense(x1.dtype == x2.dtype == torch.int8, f"{x1.dtype} by {x2.dtype}, must be int8 by int8")
    (M, K), N = x1.shape, x2.shape[1]
    _dense(x2.shape[0] == K, f"{list(x1.shape)} by {list(x2.shape)}")
    _dense(M > 0 and N > 0 and K > 0, f"{list(x1.shape)} by {list(x2.shape)}: empty operands are not supported")
    _dense(x1.shape[-1] <= 65535 and x2.shape[-1] <= 65535, f"last dimensions {K} and {N}, must be at most 65535")
    _dense(scale.shape in ((1,), (N,)), f"scale {list(scale.shape)}, must be [1] or [{N}]")
    _dense(bias is None or bias.shape == (N,), "bias must be [N]")
    # torch_npu's table of dtypes, the columns for bfloat16 and float16 output.
    bias_dtype = None if bias is None else bias.dtype
    if pertoken_scale is not None:
        fits = pertoken_scale.shape == (M,) and pertoken_scale.dtype == torch.float32
        _dense(fits, f"pertoken_scale must be fp32 [{M}]")
        scales = {torch.bfloat16: (torch.float32, torch.bfloat16), torch.float16: (torch.float32,)}
        biases = (None, torch.int32, torch.float32, out)
    else:
        scales = {torch.bfloat16: (torch.float32, torch.bfloat16)}
        biases = (None, torch.int32, torch.float32, torch.bfloat16)
    _dense(scale.dtype in scales.get(out, ()), f"scale {scale.dtype} for output {out}", "dtype")
    _dense(bias_dtype in biases, f"bias {bias_dtype} for output {out}", "dtype")

    total = x1.double() @ x2.double()
    if bias_dtype == torch.int32:
        total = total + bias
    y = total.float() * scale.float()
    if pertoken_scale is not None:
        y = y * pertoken_scale.unsqueeze(1)
    if bias is not None and bias_dtype != torch.int32:
        y = y + bias.float()
    return y.to(out)


@emulates(_weight_only)
def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """x [M, K] @ ((w + offset) * scale) + bias; w int8 [K, N] or int4 in int32 [K, N/8]; scale by channel or group."""
    _weight_only.no(quant_scale=quant_scale, quant_offset=quant_offset, weight_dtype=weight_dtype)
    _weight_only(x.dim() == 2 and weight.dim() == 2, f"{x.dim()}-D by {weight.dim()}-D, must be 2-D by 2-D")
    _weight_only(x.dtype in (torch.float16, torch.bfloat16), f"x is {x.dtype}, must be float16 or bfloat16", "dtype")
    _weight_only(weight.dtype in (torch.int8, torch.int32), f"weight is {weight.dtype}, must be int8 or int4 in int32")
    w = unpack_int4(weight, nibble_order) if weight.dtype == torch.int32 else weight
    (K, N), group = w.shape, antiquant_group_size
    _weight_only(x.shape[1] == K, f"x {list(x.shape)} by weight {[K, N]}")
    if group:
        fits = group % 32 == 0 and 32 <= group <= K - 1
        _weight_only(fits, f"group size {group}, must be a multiple of 32 in [32, {K - 1}]")
        allowed = [(-(-K // group), N)]
    else:
        allowed = [(N,), (1, N)]
    shape = tuple(antiquant_scale.shape)
    _weight_only(shape in allowed, f"antiquant_scale {list(shape)}, must be one of {allowed}")
    _weight_only(antiquant_scale.dtype == x.dtype, "antiquant_scale must have x's dtype", "dtype")
    if antiquant_offset is not None:
        _weight_only(antiquant_offset.shape == shape, "antiquant_offset must have the shape of antiquant_scale")
        _weight_only(antiquant_offset.dtype == x.dtype, "antiquant_offset must have x's dtype", "dtype")
    if bias is not None:
        wanted = torch.float32 if x.dtype == torch.bfloat16 else x.dtype
        _weight_only(bias.dtype == wanted, f"bias is {bias.dtype}, must be {wanted} for x {x.dtype}")
    spread = (lambda t: t.float().repeat_interleave(group, 0)[:K]) if group else Tensor.float
    offset = 0 if antiquant_offset is None else spread(antiquant_offset)
    y = x.float() @ ((w.float() + offset) * spread(antiquant_scale))
    return (y if bias is None else y + bias.float()).to(x.dtype)
