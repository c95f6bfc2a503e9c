"""4-bit integers: the orders of nibbles, and the layouts that an NPU reads made of the published ones."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimi_k3_npu.ops.experts import moe_experts
from kimi_k3_npu.ops.experts_int4 import (
    int4_group_matrix,
    moe_experts_int4_group,
    moe_experts_w4a8,
    prepare_mxfp4_as_int4,
    prepare_w4a8,
    w4a8_bias,
    w4a8_matrix,
)
from kimi_k3_npu.ops.int4 import pack_columns, pack_rows, rows_to_columns, unpack_columns, unpack_rows
from kimi_k3_npu.ops.quant import mxfp4_dequantize, mxfp4_quantize
from kimi_k3_npu.ops.quant_linear import dynamic_quant_int8, prepare_w8a8, w8a8_linear

SIZES = st.tuples(st.integers(1, 3), *[st.integers(1, 4).map(lambda n: 8 * n)] * 2)


def random_codes(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int8)


def test_nibbles_along_rows() -> None:
    packed = pack_rows(torch.tensor([[1, -1], [2, -8], [7, 0], [-2, 3]], dtype=torch.int8))
    assert packed.view(torch.uint8).tolist() == [[0x21, 0x8F], [0xE7, 0x30]]


def test_nibbles_along_columns() -> None:
    packed = pack_columns(torch.tensor([[1, 2, 3, 4, 5, 6, 7, -8]], dtype=torch.int8))
    assert packed.dtype == torch.int32
    assert struct.pack("<i", packed.item()).hex() == "21436587"
    assert [(packed.item() >> 4 * j) & 0xF for j in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


@given(SIZES)
def test_packing_and_back(sizes: tuple[int, int, int]) -> None:
    codes = random_codes(*sizes)
    assert torch.equal(unpack_rows(pack_rows(codes)), codes)
    assert torch.equal(unpack_columns(pack_columns(codes)), codes)


@given(SIZES)
def test_a_transposition_turns_rows_into_columns(sizes: tuple[int, int, int]) -> None:
    codes = random_codes(*sizes)
    columns = rows_to_columns(pack_rows(codes)).view(torch.int32)
    assert torch.equal(unpack_columns(columns), codes.transpose(-1, -2))


def test_preparing_w4a8() -> None:
    codes, scale = random_codes(3, 32, 16), torch.rand(3, 32, 1)
    bias = 8 * (codes * scale).unflatten(-1, (4, 4)).sum(-1)
    ready, bits, total = prepare_w4a8(pack_rows(codes), scale, bias)
    assert (ready.shape, ready.dtype) == ((3, 16, 4), torch.int32)
    assert (bits.shape, bits.dtype) == ((3, 1, 32), torch.int64)
    assert (total.shape, total.dtype) == ((3, 32), torch.float32)
    for e in range(3):
        assert torch.equal(unpack_columns(ready[e]), codes[e].t())
        for number, exact in zip(bits[e, 0].tolist(), scale[e, :, 0].tolist(), strict=True):
            assert struct.unpack("<fI", struct.pack("<q", number)) == (exact, 0)  # the high half is 0
    torch.testing.assert_close(total, 8 * (codes * scale).sum(-1))
    torch.testing.assert_close(w4a8_bias(pack_rows(codes), scale).squeeze(-1), total)


def test_scales_that_are_negative_keep_a_clear_high_half() -> None:
    _, bits, _ = prepare_w4a8(pack_rows(random_codes(1, 8, 8)), torch.full((1, 8, 1), -0.5), torch.zeros(1, 8, 1))
    assert bits.unique().tolist() == [0xBF000000]


def test_both_layouts_of_w4a8_are_one_matrix() -> None:
    codes, scale = random_codes(2, 32, 16), torch.rand(2, 32, 1)
    ready, bits, _ = prepare_w4a8(pack_rows(codes), scale, torch.zeros(2, 32, 1))
    for e in range(2):
        published = w4a8_matrix(pack_rows(codes)[e], scale[e], torch.float32)
        assert torch.equal(published, codes[e] * scale[e])
        assert torch.equal(w4a8_matrix(ready[e], bits[e], torch.float32), published)


@pytest.mark.parametrize(("N", "K"), [(16, 64), (64, 64), (8, 32), (32, 256)])
def test_grouped_int4_is_the_sum_of_its_parts(N: int, K: int) -> None:
    parts, scale = [random_codes(K, N) for _ in range(2)], torch.rand(K // 32, N)
    want = sum(part.float() for part in parts) * scale.repeat_interleave(32, dim=0)
    assert torch.equal(int4_group_matrix([pack_columns(part) for part in parts], scale, torch.float32), want.t())


def test_mxfp4_is_two_int4_exactly() -> None:
    """Every code under scales from the smallest that bfloat16 holds exactly halved to a large one."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(1, 8, 2)  # [1, 8, 32]
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    scale = torch.tensor([0, 1, 2, 100, 127, 128, 200, 254], dtype=torch.uint8).view(1, 8, 1)
    parts, halves = prepare_mxfp4_as_int4(packed, scale, torch.bfloat16)
    first, second = (unpack_columns(part) for part in parts)
    assert (first * second >= 0).all()
    matrix = int4_group_matrix([part[0] for part in parts], halves[0], torch.float32)
    assert torch.equal(matrix, mxfp4_dequantize(packed[0], scale[0], torch.float32))


def test_a_scale_of_nan_stays_nan() -> None:
    packed, scale = torch.full((1, 8, 16), 0x22, dtype=torch.uint8), torch.full((1, 8, 1), 255, dtype=torch.uint8)
    parts, halves = prepare_mxfp4_as_int4(packed, scale, torch.bfloat16)
    assert int4_group_matrix([part[0] for part in parts], halves[0], torch.float32).isnan().all()


@pytest.mark.parametrize("T", [0, 1, 9])
def test_experts_are_those_of_the_expanded_matrices(T: int) -> None:
    H, I, E = 64, 32, 4
    routed = torch.randn(T, H), torch.rand(T, 2), torch.rand(T, E).argsort(dim=-1)[:, :2].int()
    codes = random_codes(E, 2 * I, H), random_codes(E, H, I)
    held, rest = slice(1, 4), (1, 4.0, 25.0)

    def check(out: Tensor, *matrices: Tensor) -> None:
        torch.testing.assert_close(out, moe_experts(*routed, *([matrix[held]] for matrix in matrices), False, *rest))

    scales = torch.rand(E, 2 * I, 1) / 8, torch.rand(E, H, 1) / 8
    w4a8 = [[part[held] for part in (pack_rows(c), scale, scale)] for c, scale in zip(codes, scales, strict=True)]
    check(moe_experts_w4a8(*routed, *w4a8, False, *rest), *(c * scale for c, scale in zip(codes, scales, strict=True)))

    published = [mxfp4_quantize(torch.randn(E, 2 * I, H) / 8), mxfp4_quantize(torch.randn(E, H, I) / 8)]
    pairs = [prepare_mxfp4_as_int4(*(x[held] for x in matrix), torch.float32) for matrix in published]
    out = moe_experts_int4_group(*routed, *([*codes, scale] for codes, scale in pairs), False, *rest)
    check(out, *(mxfp4_dequantize(*matrix, torch.float32) for matrix in published))


def test_rows_of_int8() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [254.0, 3.0, -1.0]])
    codes, scale = dynamic_quant_int8(x)
    assert codes.tolist() == [[64, -127, 32], [0, 0, 0], [127, 2, 0]]  # 63.5, 31.75; 1.5 and -0.5 go to even
    assert scale.tolist() == pytest.approx([2 / 127, 0.0, 2.0])


@pytest.mark.parametrize("shape", [(0, 16), (5, 16), (2, 3, 16)])
def test_w8a8(shape: tuple[int, ...]) -> None:
    x, weight, scale = torch.randn(shape), torch.randint(-128, 128, (8, 16), dtype=torch.int8), torch.rand(8, 1)
    want = x @ (weight * scale).t()
    torch.testing.assert_close(w8a8_linear(x, weight, scale, None), want)
    torch.testing.assert_close(w8a8_linear(x, weight, scale.flatten(), torch.ones(8)), want + 1)
    prepared = prepare_w8a8(weight)
    assert prepared.t().is_contiguous()
    assert torch.equal(prepared, weight)
