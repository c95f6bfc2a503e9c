"""No NPU kernel is reachable with a shape, dtype or device that its own limits refuse.

The emulated operators raise outside their documented limits, which are written down there apart from the selectors'. So
whatever an operator of ours is called with, on any device, it must run and give what the reference gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_k3_npu.ops import attention, op
from kimi_k3_npu.ops import experts as experts_module
from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.experts_int4 import prepare_mxfp4_as_int4, prepare_w4a8
from kimi_k3_npu.ops.grouped import ID_BOUND
from kimi_k3_npu.ops.int4 import pack_rows
from kimi_k3_npu.ops.op import OPS, Choice, npu_operators
from tests.npu.emulation import fresh, install, with_sgl_kernel_npu
from tests.npu.emulation.weights import nz_tiles
from tests.npu.on_cpu import on_cpu

Draw = Callable[[st.SearchStrategy], Any]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = st.sampled_from([BF16, FP16, FP32])
TOKENS = st.integers(0, 3)
ROUTED = st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from([0, 1, 2, 300, 10239]))

DEVICES = st.builds(
    lambda soc, cann, packages: Device(soc, parse_cann(cann), frozenset(packages)),
    st.sampled_from(["a2", "a3", "a5"]),
    st.sampled_from(["8.5", "9.1", "9.2"]),
    st.sampled_from([(), ("sgl_kernel_npu",)]),
)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)
    install()
    monkeypatch.setattr(experts_module, "is_nz", lambda weight: nz_tiles(weight) is not None)
    with with_sgl_kernel_npu():
        yield


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Candidates that ran although they refuse the case that was chosen for."""
    found: list[str] = []
    choose = op.choose

    def checked(name: str, candidates: Any, case: Any, forced: str | None = None) -> Choice:
        choice = choose(name, candidates, case, forced)
        (candidate,) = [each for each in candidates if each.name == choice.name]
        if reason := candidate.refuse(case):
            found.append(f"{name}: {choice.name} refuses {case}: {reason}")
        return choice

    monkeypatch.setattr(op, "choose", checked)
    return found


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape).to(dtype)


def maybe_strided(draw: Draw, x: Tensor) -> Tensor:
    """x as it is, or as a view of something wider."""
    return torch.cat([x, x], dim=-1)[..., : x.shape[-1]] if draw(st.booleans()) else x


def rms_norm(draw: Draw, device: Device) -> tuple:
    shape = draw(st.sampled_from([(8,), (3, 8), (0, 8), (2, 3, 8), (1,) * 8 + (8,)]))
    return randn(*shape, dtype=draw(DTYPES)), randn(8, dtype=draw(DTYPES)), 1e-5


def add_rms_norm(draw: Draw, device: Device) -> tuple:
    dtype, shape = draw(DTYPES), draw(st.sampled_from([(8,), (3, 8), (0, 8), (2, 3, 8)]))
    return randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(8, dtype=draw(DTYPES)), 1e-5


def situ_and_mul(draw: Draw, device: Device) -> tuple:
    gate_up = maybe_strided(draw, randn(draw(TOKENS), 12, dtype=draw(DTYPES)))
    return gate_up, 4.0, draw(st.sampled_from([25.0, None]))


def mix_residuals(draw: Draw, device: Device) -> tuple:
    T, rows, width = draw(TOKENS), draw(st.integers(0, 2)), draw(st.sampled_from([8, 8192, 8200]))
    dtype = draw(DTYPES)
    tensors = randn(T, width, dtype=dtype), randn(T, rows, width, dtype=dtype)
    return *(maybe_strided(draw, tensor) for tensor in tensors), randn(width), 1e-5


def route(draw: Draw, device: Device) -> tuple:
    experts = draw(st.sampled_from([2, 4, 12, 2048, 2052]))
    groups = draw(st.sampled_from([1, 2]))
    kept = draw(st.integers(1, groups)) if experts > 2 else 1
    groups = groups if experts > 2 else 1
    top_k = draw(st.integers(1, min(4, experts * kept // groups)))
    options = (draw(st.booleans()), 2.5, draw(st.booleans()))
    return randn(draw(TOKENS), experts), torch.rand(experts), top_k, groups, kept, *options


def kda_gate(draw: Draw, device: Device) -> tuple:
    f = maybe_strided(draw, randn(draw(TOKENS), 2, 8, dtype=draw(DTYPES)))
    return f, randn(2), randn(2, 8), draw(st.sampled_from([-5.0, None]))


def kda_chunk(draw: Draw, device: Device) -> tuple:
    lens = draw(st.lists(st.sampled_from([0, 1, 5, 65]), max_size=3))
    h, K, V = draw(st.sampled_from([(2, 16, 32), (2, 17, 16), (1, 16, 272), (129, 16, 16)]))
    T = sum(lens)
    per_token = randn(T, h, K), randn(T, h, K) / K, randn(T, h, V, dtype=draw(DTYPES)), -torch.rand(T, h, K)
    return *per_token, torch.rand(T, h), randn(len(lens), h, K, V), lens


def lengths(draw: Draw, most: int) -> tuple[list[int], list[int]]:
    query_lens = draw(st.lists(st.sampled_from([0, 1, 5, 17]), max_size=3))
    return query_lens, [n + draw(st.integers(0 if n else 1, most)) for n in query_lens]


def latent_attention(draw: Draw, device: Device) -> tuple:
    query_lens, kv_lens = lengths(draw, 100)
    h, (R, r) = draw(st.sampled_from([1, 3, 129])), draw(st.sampled_from([(512, 64), (64, 16)]))
    capacity, dtype, T = draw(st.sampled_from([128, 136])), draw(DTYPES), sum(query_lens)
    pool = maybe_strided(draw, randn(4, capacity, R, dtype=dtype)), randn(4, capacity, r, dtype=dtype)
    slots = draw(st.permutations(range(4)))[: len(query_lens)]
    q = maybe_strided(draw, randn(T, h, R, dtype=dtype))
    return q, randn(T, h, r, dtype=dtype), *pool, slots, query_lens, kv_lens, 0.1


def causal_attention(draw: Draw, device: Device) -> tuple:
    query_lens, kv_lens = lengths(draw, 20)
    h, (D, V) = (
        draw(st.sampled_from([1, 3, 257])),
        draw(st.sampled_from([(192, 128), (128, 128), (72, 16), (128, 192)])),
    )
    dtype, T, Tk = draw(DTYPES), sum(query_lens), sum(kv_lens)
    v = maybe_strided(draw, randn(Tk, h, V, dtype=dtype))
    return randn(T, h, D, dtype=dtype), randn(Tk, h, D, dtype=dtype), v, query_lens, kv_lens, 0.1


def v_up(draw: Draw, device: Device) -> tuple:
    M, B, dtype = draw(TOKENS), draw(st.sampled_from([1, 3])), draw(DTYPES)
    K, N = draw(st.sampled_from([(128, 128), (256, 128), (72, 16)]))
    return maybe_strided(draw, randn(M, B, K, dtype=dtype)), maybe_strided(draw, randn(B, K, N, dtype=dtype))


def routed(draw: Draw, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Tokens that visit experts 0..3, how many are held here, and from which on."""
    T, held, first = draw(ROUTED)
    ids = torch.rand(T, 4).argsort(dim=-1)[:, :2].to(draw(st.sampled_from([torch.int32, torch.int64])))
    return randn(T, width, dtype=dtype), torch.rand(T, 2), ids, held, first


def moe_experts(draw: Draw, device: Device) -> tuple:
    dtype = draw(DTYPES)
    x, weights, ids, held, first = routed(draw, 16, dtype)
    matrices = [randn(held, 24, 16, dtype=dtype)], [randn(held, 16, 12, dtype=dtype)]
    return x, weights, ids, *matrices, False, first, draw(st.sampled_from([4.0, None])), 25.0


def mxfp4(held: int, N: int, K: int) -> tuple[Tensor, Tensor]:
    return torch.randint(256, (held, N, K // 2)).to(torch.uint8), torch.randint(118, 126, (held, N, K // 32)).byte()


def moe_experts_mxfp4(draw: Draw, device: Device) -> tuple:
    x, weights, ids, held, first = routed(
        draw, width := draw(st.sampled_from([96, 128])), draw(st.sampled_from([BF16, FP32]))
    )
    inner = draw(st.sampled_from([128, 160]))
    w13, w2 = mxfp4(held, 2 * inner, width), mxfp4(held, width, inner)
    if draw(st.booleans()):
        w13, w2 = (OPS["as_nz"].npu(w13[0], True), w13[1]), (OPS["as_nz"].npu(w2[0], True), w2[1])
    return x, weights, ids, list(w13), list(w2), False, first, 4.0, 25.0


def w4a8(held: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale = torch.randint(-8, 8, (held, N, K), dtype=torch.int8), torch.rand(held, N, 1)
    return pack_rows(codes), scale, 8 * (codes * scale).sum(-1, keepdim=True)


def moe_experts_w4a8(draw: Draw, device: Device) -> tuple:
    x, weights, ids, held, first = routed(draw, 64, draw(DTYPES))
    matrices = w4a8(held, 128, 64), w4a8(held, 64, 64)
    if draw(st.booleans()):
        with on_cpu():
            matrices = tuple(prepare_w4a8(*matrix) for matrix in matrices)
    return x, weights, ids, *map(list, matrices), False, first, 4.0, 25.0


def moe_experts_int4_group(draw: Draw, device: Device) -> tuple:
    """Laid out or not. What is laid out is only ever read by the product; on the emulated device it looks the same."""
    dtype = draw(st.sampled_from([BF16, FP32]))
    x, weights, ids, held, first = routed(draw, 64, dtype)
    matrices: list[Any] = []
    can_be = bool(held) and dtype == BF16 and device.soc != "a5" and first + held <= ID_BOUND
    laid_out = can_be and draw(st.booleans())
    for N, K in ((128, 64), (64, 64)):
        codes, scale = prepare_mxfp4_as_int4(*mxfp4(held, N, K), dtype) if held else nothing(N, K, dtype)
        matrices.append([*codes, scale])
    return x, weights, ids, *matrices, laid_out, first, 4.0, 25.0


def nothing(N: int, K: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """The matrices of no expert."""
    return [torch.zeros(0, K, N // 8, dtype=torch.int32)] * 2, torch.zeros(0, K // 32, N, dtype=dtype)


def dynamic_quant_int8(draw: Draw, device: Device) -> tuple:
    return (randn(*draw(st.sampled_from([(8,), (3, 8), (0, 8), (2, 0, 8), (2, 3, 8)])), dtype=draw(DTYPES)),)


def w8a8_linear(draw: Draw, device: Device) -> tuple:
    weight = torch.randint(-127, 128, (draw(st.sampled_from([8, 65535, 65536])), 4), dtype=torch.int8)
    x = randn(*draw(st.sampled_from([(3, 4), (0, 4), (2, 1, 4)])), dtype=draw(DTYPES))
    bias = draw(st.sampled_from([None, torch.ones(len(weight))]))
    return x, weight, torch.rand(len(weight), 1).to(draw(st.sampled_from([FP32, BF16]))), bias


def as_nz(draw: Draw, device: Device) -> tuple:
    dtype, fp4 = draw(st.sampled_from([(torch.int8, False), (BF16, False), (torch.uint8, True)]))
    shape = 2, draw(st.sampled_from([0, 16, 17, 32])), draw(st.sampled_from([16, 32, 64, 48]))
    return torch.zeros(shape, dtype=dtype), fp4


#: What draws the arguments of each operator.
ARGUMENTS = {
    function.__name__: function
    for function in (
        *(rms_norm, add_rms_norm, situ_and_mul, mix_residuals, route, kda_gate, kda_chunk, latent_attention),
        *(causal_attention, v_up, moe_experts, moe_experts_mxfp4, moe_experts_w4a8, moe_experts_int4_group),
        *(dynamic_quant_int8, w8a8_linear, as_nz),
    )
}
ARGUMENTS["q_absorb"] = v_up


def test_every_kernel_is_tried():
    assert set(ARGUMENTS) == set(npu_operators())


@pytest.mark.parametrize("name", ARGUMENTS)
@settings(
    max_examples=40,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_what_is_chosen_runs_within_the_limits(name: str, refused: list[str], data: st.DataObject):
    fresh()
    torch.manual_seed(0)
    device = data.draw(DEVICES)
    with assume(device):
        arguments = ARGUMENTS[name](data.draw, device)
        got = OPS[name].npu(*arguments)
    assert not refused
    if name == "moe_experts_int4_group":
        arguments = (*arguments[:5], False, *arguments[6:])
    want = OPS[name].reference(*arguments)
    for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (got, want)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a.isnan(), b.isnan())


def test_limits_of_the_absorbed_form_that_no_memory_holds():
    case = attention.Latent(1, 12, (512, 64), 8192, 512, BF16, BF16, True, Device("a3", parse_cann("9.1")))
    assert attention.refuse_latent(case) == "the pool has 2147483648 elements, must be below 2^31"
