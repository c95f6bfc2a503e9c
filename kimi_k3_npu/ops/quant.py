"""MXFP4, the format of the published experts: 4-bit floats with one power-of-two scale for each 32 along the input.

OCP Microscaling Formats (MX) v1.0: elements are E2M1 (sign, 2 exponent bits, 1 mantissa bit), scales are E8M0, that is
2^(byte - 127), byte 255 meaning NaN. Checkpoints pack two elements in a byte, the even input index in the low nibble.
"""

# O output rows, I inputs. packed [..., O, I/2] uint8, scale [..., O, I/32] uint8.

from __future__ import annotations

import math

import torch
from torch import Tensor

from kimi_k3_npu.ops.op import operator

#: Elements that share a scale.
GROUP = 32

#: Values of the 16 codes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# The exponent of the largest E2M1 value, 6 = 1.5 * 2^2.
_MAX_EXPONENT = 2

# A byte becomes a pair of elements; this integer type holds such a pair. float16 is absent: it cannot hold the scales.
_PAIR = {torch.bfloat16: torch.int32, torch.float32: torch.int64}

# Bytes unpacked at a time: their lookup indices (4 bytes each) and results stay in a core's share of the cache.
_BLOCK = 512 << 10


@operator("mxfp4_dequantize(Tensor packed, Tensor scale, ScalarType dtype) -> Tensor")
def mxfp4_dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack MXFP4 `packed` [..., O, I/2] with `scale` [..., O, I/32] to [..., O, I] in `dtype` (bfloat16 or float32).

    The result is exact in both, except that the largest scales overflow to infinity. A NaN scale makes its group NaN.

    Raises:
        ValueError: A shape or dtype does not fit.
    """
    out = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)
    return mxfp4_dequantize_into(packed, scale, out)


def mxfp4_dequantize_into(packed: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """Like `mxfp4_dequantize`, into the contiguous `out` [..., O, I], whose dtype decides. Returns `out`.

    A table gives each byte its pair of values, which are then scaled where they lie; no temporary is as large as `out`.

    Raises:
        ValueError: A shape or dtype does not fit, or `out` is not contiguous.
    """
    _check(packed, scale, out)
    if not out.numel():
        return out
    pair = _PAIR[out.dtype]
    values = torch.tensor(E2M1, dtype=out.dtype, device=out.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=-1).view(pair).flatten()
    scales = _scale_values(out.dtype, out.device)

    packed_rows = packed.reshape(-1, packed.shape[-1])
    scale_rows = scale.reshape(-1, scale.shape[-1])
    out_rows = out.view(-1, out.shape[-1])
    step = max(1, _BLOCK // packed.shape[-1])
    for start in range(0, len(out_rows), step):
        block = out_rows[start : start + step]
        codes = packed_rows[start : start + step].flatten().int()
        torch.index_select(pairs, 0, codes, out=block.view(pair).flatten())
        factors = torch.index_select(scales, 0, scale_rows[start : start + step].flatten().int())
        block.view(-1, GROUP).mul_(factors[:, None])
    return out


def mxfp4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `weight` [..., O, I] (float32, bfloat16, float16): (packed [..., O, I/2], scale [..., O, I/32]), uint8.

    Scale and rounding are the standard's (section 6.3): 2^(floor(log2(largest magnitude of the group)) - 2), then to
    the nearest element, ties to the even code, magnitudes above 6 to 6. What MXFP4 holds already comes back unchanged,
    whatever scale it had. A group of zeros gets the smallest scale.

    Raises:
        ValueError: The dtype does not fit, I is not a multiple of 32, or a weight is NaN or infinite.
    """
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"mxfp4_quantize: weight is {weight.dtype}, expected float32, bfloat16 or float16")
    if weight.ndim == 0 or weight.shape[-1] % GROUP:
        raise ValueError(
            f"mxfp4_quantize: weight is {list(weight.shape)}, its last dimension must be a multiple of {GROUP}"
        )
    groups = weight.float().unflatten(-1, (-1, GROUP))
    if not groups.isfinite().all():
        raise ValueError("mxfp4_quantize: weight has NaN or infinite values")
    magnitude = groups.abs()
    # frexp's mantissa is in [0.5, 1), so its exponent is floor(log2) + 1, exactly and also for denormals. Of 0 it is 0.
    mantissa, exponent = torch.frexp(magnitude.amax(-1))
    scale = (exponent - 1 - _MAX_EXPONENT + 127).clamp(0, 254).masked_fill(mantissa == 0, 0)
    inverse = _scale_values(torch.float32, weight.device)[254 - scale]
    magnitude.mul_(inverse[..., None])
    # Steps between codes are 0.5 up to 2, 1 up to 4, then 2; torch.round takes ties to the even code.
    fine, middle, coarse = torch.round(2 * magnitude), 2 + torch.round(magnitude), 4 + torch.round(magnitude / 2)
    code = torch.where(magnitude < 2, fine, torch.where(magnitude < 4, middle, coarse)).clamp_(max=7).to(torch.uint8)
    code |= groups.signbit().to(torch.uint8) << 3
    code = code.flatten(-2)
    return code[..., 0::2] | code[..., 1::2] << 4, scale.to(torch.uint8)


def _scale_values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values of the 256 scale bytes."""
    # Python's powers are exact, also 2^-127, which is denormal in both dtypes.
    return torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), math.nan], dtype=dtype, device=device)


def _check(packed: Tensor, scale: Tensor, out: Tensor) -> None:
    for name, tensor in (("packed", packed), ("scale", scale)):
        if tensor.dtype != torch.uint8:
            raise ValueError(f"mxfp4_dequantize: {name} is {tensor.dtype}, expected torch.uint8")
    if out.dtype not in _PAIR:
        raise ValueError(f"mxfp4_dequantize: cannot unpack to {out.dtype}, only to {', '.join(map(str, _PAIR))}")
    if packed.ndim == 0 or packed.shape[-1] * 2 % GROUP:
        raise ValueError(
            f"mxfp4_dequantize: packed is {list(packed.shape)}, its last dimension must be a multiple of {GROUP // 2}"
        )
    leading, inputs = packed.shape[:-1], packed.shape[-1] * 2
    for name, tensor, last in (("scale", scale, inputs // GROUP), ("out", out, inputs)):
        if tensor.shape != (*leading, last):
            wanted = [*leading, last]
            raise ValueError(
                f"mxfp4_dequantize: {name} is {list(tensor.shape)}, packed {list(packed.shape)} needs {wanted}"
            )
    if not out.is_contiguous() or out.storage_offset() % 2:
        raise ValueError("mxfp4_dequantize: out must be contiguous and start at an even element of its storage")
