"""MXFP4: every byte with every scale against a formula; quantising what is already MXFP4 changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kimi_k3_npu.ops import quant
from kimi_k3_npu.ops.quant import mxfp4_dequantize, mxfp4_dequantize_into, mxfp4_quantize

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def element(code: int, scale: int) -> float:
    """One value by the definition of the formats: sign, 2 exponent bits with bias 1, 1 mantissa bit."""
    if scale == 255:
        return math.nan
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1)
    return sign * math.ldexp(magnitude, scale - 127)


def bits(x: Tensor) -> Tensor:
    """For comparisons that tell -0 from 0. A NaN is made the same NaN first."""
    return torch.where(x.isnan(), torch.nan, x).contiguous().view(torch.uint8)


def packed_and_scale(*leading: int, inputs: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (*leading, inputs // 2), dtype=torch.uint8, generator=generator)
    return packed, torch.randint(100, 150, (*leading, inputs // 32), dtype=torch.uint8, generator=generator)


@DTYPES
def test_every_byte_with_every_scale(dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)  # [scale, byte]
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 16).contiguous()
    table = torch.tensor([[element(code, s) for code in range(16)] for s in range(256)], dtype=torch.float64)
    byte = torch.arange(256)
    exact = torch.stack([table[:, byte & 15], table[:, byte >> 4]], dim=-1).flatten(1)
    found = mxfp4_dequantize(packed, scale, dtype)
    assert found.dtype == dtype
    assert torch.equal(bits(found), bits(exact.to(dtype)))
    # Nothing was rounded; only 2^128 and more (codes from 2 on at the largest scales) is beyond both dtypes.
    finite = found.isfinite()
    assert torch.equal(found.double()[finite], exact[finite])
    assert torch.equal(finite, exact.abs() < 2.0**128)


@DTYPES
def test_a_nan_scale_stays_in_its_group(dtype: torch.dtype) -> None:
    packed, scale = packed_and_scale(2, inputs=96)
    scale[1, 1] = 255
    found = mxfp4_dequantize(packed, scale, dtype)
    assert found[1, 32:64].isnan().all()
    assert found.isnan().sum() == 32


@DTYPES
@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_blocks_do_not_show(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, scale = packed_and_scale(3, 5, inputs=128)
    wanted = mxfp4_dequantize(packed, scale, dtype)
    monkeypatch.setattr(quant, "_BLOCK", block)
    assert wanted.shape == (3, 5, 128)
    assert torch.equal(mxfp4_dequantize(packed, scale, dtype), wanted)
    for expert in range(3):
        assert torch.equal(mxfp4_dequantize(packed[expert], scale[expert], dtype), wanted[expert])


@DTYPES
def test_into_fills_just_the_given_rows(dtype: torch.dtype) -> None:
    packed, scale = packed_and_scale(4)
    parameter = torch.full((2, 6, 64), 7.0, dtype=dtype)
    out = parameter[1, 1:5]
    assert mxfp4_dequantize_into(packed, scale, out) is out
    assert torch.equal(out, mxfp4_dequantize(packed, scale, dtype))
    out.fill_(7.0)
    assert (parameter == 7.0).all()


def test_strided_inputs() -> None:
    packed, scale = packed_and_scale(4, inputs=128)
    wanted = mxfp4_dequantize(packed, scale, torch.float32)
    found = mxfp4_dequantize(packed[::2, 16:48], scale[::2, 1:3], torch.float32)
    assert torch.equal(found, wanted[::2, 32:96])


@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 4, 16)])
def test_no_elements(shape: tuple[int, ...]) -> None:
    scale = torch.empty(*shape[:-1], shape[-1] // 16, dtype=torch.uint8)
    found = mxfp4_dequantize(torch.empty(shape, dtype=torch.uint8), scale, torch.bfloat16)
    assert found.shape == (*shape[:-1], 2 * shape[-1])


def test_operator_rules() -> None:
    packed, scale = packed_and_scale(8)
    wanted = mxfp4_dequantize(packed, scale, torch.float32)
    torch.library.opcheck(mxfp4_dequantize.overload, (packed, scale, torch.bfloat16))
    with FakeTensorMode() as mode:
        fake = mxfp4_dequantize(mode.from_tensor(packed), mode.from_tensor(scale), torch.float32)
    assert (fake.shape, fake.dtype) == ((8, 64), torch.float32)
    # A lookup table kept from the fake run would spoil the real ones after it.
    assert torch.equal(mxfp4_dequantize(packed, scale, torch.float32), wanted)


@pytest.mark.parametrize(
    ("packed", "scale", "dtype", "message"),
    [
        (torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8), torch.float32, r"packed is torch\.float32"),
        (torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1), torch.float32, r"scale is torch\.float32"),
        ((2, 16), (2, 1), torch.float16, r"cannot unpack to torch\.float16, only to torch\.bfloat16, torch\.float32"),
        ((2, 15), (2, 1), torch.float32, r"packed is \[2, 15\], its last dimension must be a multiple of 16"),
        ((2, 32), (2, 1), torch.float32, r"scale is \[2, 1\], packed \[2, 32\] needs \[2, 2\]"),
        ((2, 32), (3, 2), torch.float32, r"scale is \[3, 2\], packed \[2, 32\] needs \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    packed: Tensor | tuple[int, ...], scale: Tensor | tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    packed, scale = (torch.zeros(x, dtype=torch.uint8) if isinstance(x, tuple) else x for x in (packed, scale))
    with pytest.raises(ValueError, match=message):
        mxfp4_dequantize(packed, scale, dtype)


def test_an_output_that_does_not_fit_is_refused() -> None:
    packed, scale = packed_and_scale(4)
    with pytest.raises(ValueError, match=r"out is \[4, 32\], packed \[4, 32\] needs \[4, 64\]"):
        mxfp4_dequantize_into(packed, scale, torch.empty(4, 32))
    with pytest.raises(ValueError, match="out must be contiguous"):
        mxfp4_dequantize_into(packed, scale, torch.empty(64, 4).t())
    with pytest.raises(ValueError, match="start at an even element"):
        mxfp4_dequantize_into(packed, scale, torch.empty(4 * 64 + 1)[1:].view(4, 64))


# --- quantising

CODES = st.lists(st.integers(0, 255), min_size=64, max_size=64)


@given(codes=CODES, scales=st.lists(st.integers(0, 250), min_size=4, max_size=4), sparse=st.integers(0, 7))
def test_what_is_mxfp4_already_comes_back_bit_for_bit(codes: list[int], scales: list[int], sparse: int) -> None:
    # Few set bits make groups whose largest magnitude is small: a smaller scale must then hold the values as well.
    packed = torch.tensor(codes, dtype=torch.uint8).view(2, 32) & [255, 0x11, 0x22, 0x88, 0x99, 0x33, 0xBB, 0][sparse]
    weight = mxfp4_dequantize(packed, torch.tensor(scales, dtype=torch.uint8).view(2, 2), torch.float32)
    again, scale = mxfp4_quantize(weight)
    assert torch.equal(bits(mxfp4_dequantize(again, scale, torch.float32)), bits(weight))
    assert torch.equal(bits(mxfp4_dequantize(again, scale, torch.bfloat16)), bits(weight.bfloat16()))


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0.25, 0),
        (0.26, 0.5),
        (0.75, 1),
        (1.25, 1),
        (1.75, 2),
        (2.5, 2),
        (2.51, 3),
        (3.5, 4),
        (5, 4),
        (5.01, 6),
        (7.9, 6),
    ],
)
@pytest.mark.parametrize("exponent", [-100, 0, 90])
def test_rounding_is_to_nearest_even_and_saturates(value: float, rounded: float, exponent: int) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 5], weight[0, 6] = 4.0, value, -value  # 4 makes the scale 1
    packed, scale = mxfp4_quantize(torch.ldexp(weight, torch.tensor(exponent)))
    assert scale.item() == 127 + exponent
    found = torch.ldexp(mxfp4_dequantize(packed, scale, torch.float32), torch.tensor(-exponent))
    assert found[0, [0, 5, 6]].tolist() == [4.0, rounded, -rounded]


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, 0),
        (1e-45, 0),
        (2.0**-126, 0),
        (2.0**-124, 1),
        (0.99, 124),
        (1.0, 125),
        (1.99, 125),
        (7.0, 127),
        (3e38, 252),
    ],
)
def test_scale_follows_the_largest_magnitude(largest: float, scale: int) -> None:
    weight = torch.zeros(1, 64)
    weight[0, 40] = -largest
    packed, found = mxfp4_quantize(weight)
    assert found.tolist() == [[0, scale]]
    assert packed.shape == (1, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    weight = torch.randn(3, 4, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed, scale = mxfp4_quantize(weight)
    assert (packed.shape, scale.shape, packed.dtype, scale.dtype) == ((3, 4, 48), (3, 4, 3), torch.uint8, torch.uint8)
    error = (mxfp4_dequantize(packed, scale, torch.float32) - weight.float()).abs().unflatten(-1, (-1, 32))
    # The largest step is 2 scales; saturation from just below 8 to 6 costs 2.
    assert (error.amax(-1) <= 2 * torch.exp2(scale.float() - 127)).all()
    assert error.mean() < 0.15


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.float64), r"weight is torch\.float64"),
        (torch.zeros(2, 33), r"weight is \[2, 33\], its last dimension must be a multiple of 32"),
        (torch.tensor(1.0), r"weight is \[\]"),
        (torch.full((1, 32), math.inf), "NaN or infinite"),
        (torch.full((1, 32), math.nan), "NaN or infinite"),
    ],
)
def test_what_cannot_be_quantised_is_refused(weight: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mxfp4_quantize(weight)
