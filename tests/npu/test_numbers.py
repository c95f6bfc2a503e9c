"""Every NPU kernel equals its reference, in numbers: on CPU tensors, with torch_npu's operators emulated.

The emulation enforces the documented limits and fills what an operator leaves unset with NaN, so a kernel that is
chosen where it must not be, or that reads what nobody wrote, fails here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops import attention, residual
from kimi_k3_npu.ops import experts as experts_module
from kimi_k3_npu.ops.attention import causal_attention, latent_attention
from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.experts import moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.experts_int4 import (
    int4_layout,
    moe_experts_int4_group,
    moe_experts_w4a8,
    prepare_mxfp4_as_int4,
    prepare_w4a8,
    w4a8_bias,
    w4a8_matrix,
)
from kimi_k3_npu.ops.grouped import expand, grouped_matmul
from kimi_k3_npu.ops.int4 import pack_rows
from kimi_k3_npu.ops.kda import kda_gate, l2_norm
from kimi_k3_npu.ops.kda_chunk import kda_chunk
from kimi_k3_npu.ops.norm import add_rms_norm, rms_norm
from kimi_k3_npu.ops.nz import as_nz
from kimi_k3_npu.ops.op import CHOSEN, OPS
from kimi_k3_npu.ops.quant import mxfp4_dequantize, mxfp4_quantize
from kimi_k3_npu.ops.quant_linear import dynamic_quant_int8, prepare_w8a8, w8a8_linear
from kimi_k3_npu.ops.residual import mix_residuals
from kimi_k3_npu.ops.routing import route
from kimi_k3_npu.ops.situ import gated_activation_of_groups, situ_and_mul
from tests.npu.emulation import calls, fresh, install, with_sgl_kernel_npu
from tests.npu.emulation import experts as experts_emulation
from tests.npu.emulation import weights as weights_emulation
from tests.npu.emulation.weights import decode_e8m0, nz_tiles
from tests.npu.on_cpu import on_cpu

BF16, FP32 = torch.bfloat16, torch.float32
#: Half a unit in the last place of bfloat16, relative: what rounding a result once may cost.
ROUNDING = 2**-8

A3 = Device("a3", parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))
BARE_A3 = Device("a3", parse_cann("9.1"))
A5 = Device("a5", parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install()
    fresh()
    CHOSEN.clear()
    torch.manual_seed(0)
    monkeypatch.setattr(experts_module, "is_nz", lambda weight: nz_tiles(weight) is not None)
    with with_sgl_kernel_npu(), assume(A3):
        yield


def chosen(op: str) -> str:
    """The candidate that ran for `op`, the only one."""
    (name,) = [kernel for name, kernel in CHOSEN if name == op]
    return name


def close(got: Tensor, want: Tensor, relative: float = 1e-5) -> None:
    """Shape and dtype as wanted, and no element off by more than `relative` of the largest."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel():
        error = (got.double() - want.double()).abs().max().item()
        assert error <= relative * want.double().abs().max().item(), error


# --- norms, activations, residuals ---


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("T", [0, 1, 17])
def test_norms(T: int, dtype: torch.dtype):
    x, residual_, weight = (torch.randn(*shape).to(dtype) for shape in ((T, 64), (T, 64), (64,)))
    close(rms_norm.npu(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5), 2 * ROUNDING if dtype == BF16 else 1e-6)
    y, total = add_rms_norm.npu(x, residual_, weight, 1e-5)
    want_y, want_total = add_rms_norm.reference(x, residual_, weight, 1e-5)
    close(total, want_total, 0)
    close(y, want_y, 4 * ROUNDING if dtype == BF16 else 1e-6)  # the operator norms the sum before or after rounding it
    assert dict(calls) == ({"npu_rms_norm": 1, "npu_add_rms_norm": 1} if T else {})


def test_norm_of_mixed_dtypes_is_composed():
    x, weight = torch.randn(3, 64, dtype=BF16), torch.randn(64)
    close(rms_norm.npu(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5), 0)
    assert chosen("rms_norm") == "composed"


@pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (1.5, 3.0)])
@pytest.mark.parametrize("T", [0, 1, 17])
def test_situ(T: int, betas: tuple[float, float | None]):
    gate_up = (torch.randn(T, 3, 48) * 10).to(BF16)
    want = situ_and_mul.reference(gate_up, *betas)
    close(situ_and_mul.npu(gate_up, *betas), want, 2 * ROUNDING)
    assert calls["situ_and_mul"] == bool(T)
    with assume(BARE_A3):
        close(situ_and_mul.npu(gate_up, *betas), want, 0)


def test_situ_of_groups_leaves_other_rows_unset():
    gate_up = torch.randn(9, 8)
    gate_up[6:] = torch.nan
    counts = torch.tensor([2, 0, 4])
    want = situ_and_mul.reference(gate_up[:6], 4.0, 25.0)
    for device, unset in ((A3, 3), (BARE_A3, 3)):
        with assume(device):
            out = gated_activation_of_groups(gate_up, counts, 4.0, 25.0)
        close(out[:6], want, 1e-6)
        assert out[6:].isnan().all(dim=1).sum() == unset
    silu = gated_activation_of_groups(gate_up, counts, None, None)
    close(silu[:6], F.silu(gate_up[:6, :4]) * gate_up[:6, 4:])


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("T", "rows"), [(0, 3), (1, 1), (9, 8)])
def test_mixture(T: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    prefix, bank, weight = torch.randn(T, 64).to(dtype), torch.randn(T, rows, 64).to(dtype), torch.randn(64)
    want = mix_residuals.reference(prefix, bank, weight, 1e-5)
    tolerance = 2 * ROUNDING if dtype == BF16 else 1e-5
    close(mix_residuals.npu(prefix, bank, weight, 1e-5), want, tolerance)
    assert calls["mix_fused"] == bool(T)
    monkeypatch.setattr(residual, "OFFSET_LIMIT", 2 * rows * 64 + 1)  # two tokens a launch
    close(mix_residuals.npu(prefix, bank, weight, 1e-5), want, tolerance)
    assert calls["mix_fused"] == bool(T) + -(-T // 2)
    with assume(BARE_A3):
        close(mix_residuals.npu(prefix, bank, weight, 1e-5), want, 0)


# --- routing ---


def as_table(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    return torch.zeros(len(ids), experts).scatter_(1, ids.long(), weights)


@pytest.mark.parametrize(("experts", "top_k"), [(896, 16), (16, 4), (16, 16)])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
@pytest.mark.parametrize("T", [0, 1, 50])
def test_routing(T: int, scaling: float, experts: int, top_k: int):
    logits, bias = torch.randn(T, experts), torch.rand(experts)
    options = (top_k, 1, 1, True, scaling, True)
    weights, ids = route.npu(logits, bias, *options)
    want_weights, want_ids = route.reference(logits, bias, *options)
    assert ids.dtype == want_ids.dtype
    close(as_table(weights, ids, experts), as_table(want_weights, want_ids, experts), 1e-6)
    assert calls["npu_moe_gating_top_k"] == bool(T)


@pytest.mark.parametrize(
    ("top_k", "groups", "renormalize", "sigmoid"),
    [(4, (4, 2), True, True), (4, (1, 1), False, True), (4, (1, 1), True, False), (1, (1, 1), True, True)],
    ids=["masked groups", "not renormalised", "softmax", "one expert"],
)
def test_what_the_gating_operator_computes_otherwise_is_composed(
    top_k: int, groups: tuple[int, int], renormalize: bool, sigmoid: bool
):
    logits, bias = torch.randn(20, 16), torch.randn(16)
    options = (top_k, *groups, renormalize, 2.5, sigmoid)
    weights, ids = route.npu(logits, bias, *options)
    close(as_table(weights, ids, 16), as_table(*route.reference(logits, bias, *options), 16), 0)
    assert chosen("route") == "composed"
    assert not calls


def test_groups_that_all_take_part_are_no_groups():
    logits, bias = torch.randn(20, 16), torch.rand(16)
    weights, ids = route.npu(logits, bias, 4, 4, 4, True, 1.0, True)
    close(as_table(weights, ids, 16), as_table(*route.reference(logits, bias, 4, 4, 4, True, 1.0, True), 16), 1e-6)
    assert calls["npu_moe_gating_top_k"] == 1


# --- KDA ---


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("T", [0, 1, 17])
def test_decay(T: int, lower_bound: float | None):
    f, A_log, dt_bias = torch.randn(T, 3, 16).to(BF16), torch.randn(3), torch.randn(3, 16)
    want = kda_gate.reference(f, A_log, dt_bias, lower_bound)
    close(kda_gate.npu(f, A_log, dt_bias, lower_bound), want)
    close(kda_gate.npu(f.transpose(0, 1).contiguous().transpose(0, 1), A_log, dt_bias, lower_bound), want)
    assert calls["fused_kda_gate_npu"] == 2 * bool(T)
    with assume(BARE_A3):
        close(kda_gate.npu(f, A_log, dt_bias, lower_bound), want, 0)


def delta_rule(seq_lens: Sequence[int], dtype: torch.dtype) -> tuple:
    T, h, K, V = sum(seq_lens), 3, 32, 48
    q, k = l2_norm(torch.randn(T, h, K)) * K**-0.5, l2_norm(torch.randn(T, h, K))
    per_token = q, k, torch.randn(T, h, V).to(dtype), -5 * torch.rand(T, h, K), torch.rand(T, h)
    return *per_token, torch.randn(len(seq_lens), h, K, V), list(seq_lens)


@pytest.mark.parametrize("seq_lens", [(), (0,), (1,), (65,), (3, 64, 130), (5, 0, 70)], ids=str)
def test_chunked_delta_rule(seq_lens: tuple[int, ...]):
    inputs = delta_rule(seq_lens, FP32)
    for got, want in zip(kda_chunk.npu(*inputs), kda_chunk.reference(*inputs), strict=True):
        close(got, want)
    assert chosen("kda_chunk") == "composed"  # what is not bfloat16 already is not rounded
    inputs = delta_rule(seq_lens, BF16)
    for got, want in zip(kda_chunk.npu(*inputs), kda_chunk.reference(*inputs), strict=True):
        close(got, want, 4 * ROUNDING)  # q, k, v and the result are rounded
    assert calls["chunk_kda_fwd"] == (all(seq_lens) and len(seq_lens) > 0)


# --- attention ---


def pools(slots: int, capacity: int, *widths: int) -> list[Tensor]:
    """Latent rows and shared rows, some of them never written."""
    return [torch.randn(slots, capacity, width).to(BF16) for width in widths]


def exact(op: str, *arguments: object) -> Tensor:
    """The reference in fp32, rounded once."""
    wide = [x.float() if isinstance(x, Tensor) else x for x in arguments]
    return OPS[op].reference(*wide).to(BF16)


@pytest.mark.parametrize("heads", [1, 6, 12, 96, 128])
@pytest.mark.parametrize(
    ("slots", "query_lens", "kv_lens"),
    [
        ([], [], []),
        ([0, 1], [0, 0], [5, 7]),
        ([1], [1], [1]),
        ([2, 0, 1], [1, 1, 1], [200, 128, 3]),
        ([0, 2], [5, 1], [5, 300]),
        ([1, 0, 2], [40, 0, 16], [190, 9, 16]),
    ],
    ids=str,
)
def test_absorbed_attention(heads: int, slots: list[int], query_lens: list[int], kv_lens: list[int]):
    T = sum(query_lens)
    q, q_rope = (torch.randn(T, heads, width).to(BF16) for width in (512, 64))
    arguments = (q, q_rope, *pools(3, 384, 512, 64), slots, query_lens, kv_lens, 0.07)
    close(latent_attention.npu(*arguments), exact("latent_attention", *arguments), 2 * ROUNDING)
    assert calls["npu_fused_infer_attention_score_v2"] == bool(T)


def test_absorbed_attention_on_what_is_not_contiguous():
    q = torch.randn(3, 8, 576).to(BF16)
    arguments = (q[..., :512], q[..., 512:], *pools(3, 128, 512, 64), [0, 1, 2], [1, 1, 1], [9, 100, 128], 0.07)
    close(latent_attention.npu(*arguments), exact("latent_attention", *arguments), 2 * ROUNDING)
    both = pools(3, 128, 576)[0]
    arguments = (q[..., :512], q[..., 512:], both[..., :512], both[..., 512:], [0, 1, 2], [1] * 3, [9, 100, 128], 0.07)
    close(latent_attention.npu(*arguments), exact("latent_attention", *arguments), 4 * ROUNDING)
    assert calls["npu_fused_infer_attention_score_v2"] == 1  # a cache with strides is no paged cache


def test_more_sequences_than_one_call_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "MOST_SEQUENCES", 2)
    q, q_rope = (torch.randn(37, 2, width).to(BF16) for width in (512, 64))
    arguments = (q, q_rope, *pools(3, 128, 512, 64), [2, 0, 1], [33, 1, 3], [50, 9, 3], 0.07)
    close(latent_attention.npu(*arguments), exact("latent_attention", *arguments), 2 * ROUNDING)
    assert calls["npu_fused_infer_attention_score_v2"] == 3


def test_queries_are_taken_in_runs_that_the_operator_takes():
    assert attention.pieces_of([7, 3, 5], [33, 0, 16], [100, 4, 16]) == [
        (7, 16, 83),
        (7, 16, 99),
        (7, 1, 100),
        (5, 16, 16),
    ]
    assert [attention.padded_heads(heads) for heads in (1, 6, 8, 12, 24, 48, 96)] == [1, 8, 8, 16, 32, 64, 128]


@pytest.mark.parametrize(("D", "V"), [(192, 128), (128, 128)])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [([], []), ([0], [5]), ([1], [1]), ([7, 30], [7, 30]), ([7, 1, 30], [107, 40, 30]), ([4, 0, 3], [4, 9, 11])],
    ids=str,
)
def test_expanded_attention(query_lens: list[int], kv_lens: list[int], D: int, V: int):
    T, Tk = sum(query_lens), sum(kv_lens)
    q, k, v = torch.randn(T, 6, D), torch.randn(Tk, 6, D), torch.randn(Tk, 6, 2 * V)[..., V:]
    arguments = (*(x.to(BF16) for x in (q, k)), v.to(BF16), query_lens, kv_lens, D**-0.5)
    close(causal_attention.npu(*arguments), exact("causal_attention", *arguments), 2 * ROUNDING)
    assert calls["npu_fused_infer_attention_score_v2"] == bool(T)


@pytest.mark.parametrize(("D", "V", "dtype"), [(72, 16, BF16), (192, 128, FP32), (192, 128, torch.float16)])
def test_expanded_attention_of_other_sizes_is_composed(D: int, V: int, dtype: torch.dtype):
    arguments = (*(torch.randn(5, 2, size).to(dtype) for size in (D, D, V)), [5], [5], 0.1)
    close(causal_attention.npu(*arguments), causal_attention.reference(*arguments), 0)
    assert chosen("causal_attention") == "composed"


# --- experts ---

H, I, E, k = 64, 96, 6, 3
BETAS = (4.0, 25.0)
#: First expert held here, and how many; the last is held by nobody's token.
RANGES = [(0, E), (0, 2), (2, 3), (5, 1), (40, 2)]


def routed(T: int, dtype: torch.dtype, width: int = H) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.rand(T, E).argsort(dim=-1)[:, :k].to(torch.int32)
    return torch.randn(T, width).to(dtype), torch.rand(T, k), ids


def with_rounded_rows(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, first: int, rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    """`moe_experts` pair by pair, each product's rows rounded and its result in bfloat16; w13 and w2 exact."""
    out = torch.zeros(len(x), x.shape[1])
    for t, row in enumerate(x):
        for weight, e in zip(weights[t], (ids[t] - first).tolist(), strict=True):
            if 0 <= e < len(w13):
                gate_up = (rounded(row.unsqueeze(0)) @ w13[e].t()).to(BF16)
                inner = situ_and_mul.reference(gate_up, *BETAS)
                out[t] += weight * (rounded(inner) @ w2[e].t()).to(BF16).float().squeeze(0)
    return out.to(BF16)


def as_int8(rows: Tensor) -> Tensor:
    codes, scale = dynamic_quant_int8.reference(rows)
    return codes * scale.unsqueeze(1)


def as_mxfp8(rows: Tensor) -> Tensor:
    codes, scale = torch.ops.npu.npu_dynamic_mx_quant(rows, dst_type=torch.float8_e4m3fn)
    return codes.float() * decode_e8m0(scale.flatten(1)).repeat_interleave(32, 1)


@pytest.mark.parametrize("betas", [BETAS, (None, None)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("first", "held"), RANGES)
@pytest.mark.parametrize("T", [0, 1, 20])
def test_experts(T: int, first: int, held: int, dtype: torch.dtype, betas: tuple[float | None, float | None]):
    x, weights, ids = routed(T, dtype)
    w13, w2 = (torch.randn(held, 2 * I, H) / 8).to(dtype), (torch.randn(held, H, I) / 8).to(dtype)
    arguments = (x, weights, ids, [w13], [w2], False, first, *betas)
    # Both round gate_up, the activation and each expert's result; here the weights are rounded too.
    close(moe_experts.npu(*arguments), moe_experts.reference(*arguments), 6 * ROUNDING if dtype == BF16 else 1e-5)
    assert calls["npu_grouped_matmul"] == 2 * bool(T)


def test_nan_of_one_token_stays_with_it():
    x, weights, ids = routed(20, FP32)
    x[7] = torch.nan
    w13, w2 = torch.randn(2, 2 * I, H), torch.randn(2, H, I)
    for first in (0, 2, 40):
        out = moe_experts.npu(x, weights, ids, [w13], [w2], False, first, *BETAS)
        others = [t for t in range(20) if t != 7]
        assert out[others].isfinite().all()
        hit = ((ids[7] >= first) & (ids[7] < first + 2)).any()
        assert out[7].isnan().any() == hit


@pytest.mark.parametrize(("first", "held"), RANGES)
@pytest.mark.parametrize("T", [0, 1, 20])
def test_mxfp4_experts_on_a5(T: int, first: int, held: int):
    width, inner = 128, 192  # scales come in pairs, and of one pair nobody can tell whether it is transposed
    x, weights, ids = routed(T, BF16, width)
    w13, w13_scale = mxfp4_quantize(torch.randn(held, 2 * inner, width) / 8)
    w2, w2_scale = mxfp4_quantize(torch.randn(held, width, inner) / 8)
    with assume(A5):
        tiled = [as_nz.npu(w13, True), w13_scale], [as_nz.npu(w2, True), w2_scale]
        arguments = (x, weights, ids, *tiled, True, first, *BETAS)
        want = moe_experts_mxfp4.reference(*arguments)
        out = moe_experts_mxfp4.npu(*arguments)
        assert calls["npu_dynamic_mx_quant"] == 2 * bool(T)
        close(out, want, 2**-3)  # rows are rounded to e4m3, whose last place is 2^-4, twice
        matrices = mxfp4_dequantize(w13, w13_scale, FP32), mxfp4_dequantize(w2, w2_scale, FP32)
        close(out, with_rounded_rows(x, weights, ids, *matrices, first, as_mxfp8), 6 * ROUNDING)
        CHOSEN.clear()
        plain = (x, weights, ids, [w13, w13_scale], [w2, w2_scale], False, first, *BETAS)
        moe_experts_mxfp4.npu(*plain)
        assert chosen("moe_experts_mxfp4") == "composed"  # not in NZ
    CHOSEN.clear()
    close(moe_experts_mxfp4.npu(*plain), want, 0)
    assert chosen("moe_experts_mxfp4") == "composed"  # an A3


def w4a8(held: int, N: int, K: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """A published matrix and its correction in as many partial sums along K."""
    codes, scale = torch.randint(-8, 8, (held, N, K), dtype=torch.int8), torch.rand(held, N, 1) / 32
    bias = 8 * (codes * scale).unflatten(-1, (parts, -1)).sum(-1)
    return pack_rows(codes), scale, bias


@pytest.mark.parametrize(("first", "held"), RANGES)
@pytest.mark.parametrize("T", [0, 1, 20])
def test_w4a8_experts(T: int, first: int, held: int):
    x, weights, ids = routed(T, BF16)
    published = [*w4a8(held, 2 * I, H, 1)], [*w4a8(held, H, I, 16)]
    with on_cpu():
        prepared = [[*prepare_w4a8(*matrix)] for matrix in published]
    want = moe_experts_w4a8.reference(x, weights, ids, *published, False, first, *BETAS)
    close(moe_experts_w4a8.reference(x, weights, ids, *prepared, True, first, *BETAS), want, 0)
    out = moe_experts_w4a8.npu(x, weights, ids, *prepared, True, first, *BETAS)
    close(out, want, 2**-4)  # rows are rounded to 1/254 of their largest, twice
    matrices = [
        torch.stack([w4a8_matrix(codes, scale, FP32) for codes, scale in zip(*matrix[:2], strict=True)])
        for matrix in published
    ]
    close(out, with_rounded_rows(x, weights, ids, *matrices, first, as_int8), 6 * ROUNDING)
    # Of one expert there is one count, and the operator takes no list of one count.
    assert calls["npu_grouped_matmul"] == 2 * (T > 0 and held > 1)
    CHOSEN.clear()
    close(moe_experts_w4a8.npu(x, weights, ids, *published, False, first, *BETAS), want, 0)
    assert chosen("moe_experts_w4a8") == "composed"


def test_w4a8_is_exact_but_for_the_rounding_of_rows():
    """One expert a token and rows of integers, of which the largest is 127: they are their own codes."""
    x = torch.randint(-127, 128, (9, H)).to(BF16)
    x[:, 0] = 127
    published = (*w4a8(2, 2 * I, H, 1), *w4a8(2, H, I, 16))
    with on_cpu():
        codes, scale, bias = prepare_w4a8(*published[:3])
    ids = torch.arange(9).remainder(2).unsqueeze(1)
    visit = expand(x, ids, 2, 0, quantize=True)
    tensors = {"scale": scale, "bias": bias, "per_token_scale": visit.scale}
    out = grouped_matmul(visit.rows, codes, visit.counts, BF16, tensors)
    order = ids.flatten().argsort(stable=True)
    for row, token in zip(out, order, strict=True):
        matrix = w4a8_matrix(published[0][ids[token]].squeeze(0), published[1][ids[token]].squeeze(0), torch.float64)
        close(row, (matrix @ x[token].double()).to(BF16), ROUNDING)


def test_w4a8_correction_of_a_checkpoint_that_has_none():
    codes, scale, bias = w4a8(2, 8, 64, 16)
    torch.testing.assert_close(w4a8_bias(codes, scale), bias.sum(-1, keepdim=True))


#: Of the nibbles of an int32, as devices might pack and read them.
ORDERS = {
    "as in files": [0, 1, 2, 3, 4, 5, 6, 7],
    "halves apart": [0, 2, 4, 6, 1, 3, 5, 7],
    "reversed": [7, 6, 5, 4, 3, 2, 1, 0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("first", "held"), RANGES)
@pytest.mark.parametrize("T", [0, 1, 20])
def test_mxfp4_experts_as_two_int4(T: int, first: int, held: int, order: str, monkeypatch: pytest.MonkeyPatch):
    """Whatever the order of nibbles that a device packs and reads, which its page leaves open."""
    monkeypatch.setattr(weights_emulation, "nibble_order", ORDERS[order])
    monkeypatch.setattr(experts_emulation, "nibble_order", ORDERS[order])
    x, weights, ids = routed(T, BF16)
    w13, w2 = mxfp4_quantize(torch.randn(held, 2 * I, H) / 8), mxfp4_quantize(torch.randn(held, H, I) / 8)
    matrices = [[*codes, scale] for codes, scale in (prepare_mxfp4_as_int4(*matrix, BF16) for matrix in (w13, w2))]
    want = moe_experts_mxfp4.reference(x, weights, ids, w13, w2, False, first, *BETAS)
    close(moe_experts_int4_group.reference(x, weights, ids, *matrices, False, first, *BETAS), want, 0)
    with on_cpu():
        laid_out = [[*(int4_layout(part, BF16) for part in codes), scale] for *codes, scale in matrices]
    assert torch.equal(matrices[0][0], laid_out[0][0]) is (order == "as in files" or not held)
    close(moe_experts_int4_group.npu(x, weights, ids, *laid_out, True, first, *BETAS), want, 8 * ROUNDING)
    assert calls["npu_grouped_matmul"] == 4 * bool(T)
    CHOSEN.clear()
    close(moe_experts_int4_group.npu(x, weights, ids, *matrices, False, first, *BETAS), want, 0)
    assert chosen("moe_experts_int4_group") == "composed"


def test_what_is_laid_out_for_int4_products_is_never_read_otherwise():
    x, weights, ids = routed(2, FP32)
    w13, w2 = mxfp4_quantize(torch.randn(E, 2 * I, H)), mxfp4_quantize(torch.randn(E, H, I))
    matrices = [[*codes, scale] for codes, scale in (prepare_mxfp4_as_int4(*matrix, FP32) for matrix in (w13, w2))]
    with on_cpu():
        assert int4_layout(matrices[0][0], FP32) is matrices[0][0]  # no product takes rows of fp32
        with assume(Device("a5", parse_cann("9.1"))):
            assert int4_layout(matrices[0][0], BF16) is matrices[0][0]
    with pytest.raises(LaunchError, match="int4 experts lie as an NPU's products take them"):
        moe_experts_int4_group.npu(x, weights, ids, *matrices, True, 0, *BETAS)


# --- linear layers, formats ---


@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (5, 3, 48)])
def test_rounding_of_rows(shape: tuple[int, ...], dtype: torch.dtype):
    x = torch.randn(shape).to(dtype)
    x[-1:] = 0
    codes, scale = dynamic_quant_int8.npu(x)
    want_codes, want_scale = dynamic_quant_int8.reference(x)
    assert torch.equal(codes, want_codes)
    close(scale, want_scale, 0)
    assert calls["npu_dynamic_quant"] == (dtype != FP32 and shape[0] > 0)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(0, 48), (1, 48), (5, 3, 48)])
def test_w8a8(shape: tuple[int, ...], with_bias: bool):
    x, bias = torch.randn(shape).to(BF16), torch.randn(32) if with_bias else None
    weight, scale = torch.randint(-127, 128, (32, 48), dtype=torch.int8), torch.rand(32, 1) / 64
    want = w8a8_linear.reference(x, weight, scale, bias)
    with on_cpu():
        prepared = prepare_w8a8(weight)
    assert torch.equal(prepared, weight)
    for stored in (weight, prepared):
        close(w8a8_linear.npu(x, stored, scale, bias), want, 2**-6)  # rows are rounded to 1/254 of their largest
    assert calls["npu_quant_matmul"] == 2 * bool(shape[0])


def test_a_layer_wider_than_the_operator_takes_is_composed():
    x, weight, scale = torch.randn(1, 2).to(BF16), torch.ones(65536, 2, dtype=torch.int8), torch.ones(65536, 1)
    w8a8_linear.npu(x, weight, scale, None)
    assert chosen("w8a8_linear") == "composed"


def test_formats():
    weight = torch.randint(-128, 128, (3, 32, 64), dtype=torch.int8)
    tiled = as_nz.npu(weight, False)
    assert torch.equal(tiled, weight)
    assert nz_tiles(tiled) == (torch.int8, False)
    assert nz_tiles(as_nz.npu(weight[:, :5], False)) is None
    bytes_ = weight.view(torch.uint8)
    assert nz_tiles(as_nz.npu(bytes_, True)) is None  # no 4-bit floats on an A3
    with assume(A5):
        assert nz_tiles(as_nz.npu(bytes_, True)) == (torch.uint8, True)
