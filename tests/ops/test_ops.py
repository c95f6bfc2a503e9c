"""The reference operators against their definitions, written as loops or as torch's own functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kimi_k3_npu.ops import attention as attention_module
from kimi_k3_npu.ops import kda, kda_chunk
from kimi_k3_npu.ops.attention import causal_attention, latent_attention
from kimi_k3_npu.ops.experts import FEW_TOKENS, moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from kimi_k3_npu.ops.op import OPS
from kimi_k3_npu.ops.quant import mxfp4_dequantize
from kimi_k3_npu.ops.residual import mix_residuals
from kimi_k3_npu.ops.routing import route
from kimi_k3_npu.ops.situ import gated_activation, situ_and_mul


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)


# --- activations and norms ---


@pytest.mark.parametrize(("beta", "linear_beta"), [(4.0, 25.0), (4.0, None), (1.0, 0.5)])
def test_situ(beta: float, linear_beta: float | None) -> None:
    gate, up = torch.randn(2, 7, 12) * 10
    out = situ_and_mul(torch.cat([gate, up], dim=-1), beta, linear_beta)
    for index in ((0, 0), (3, 5), (6, 11)):
        g, u = gate[index].item(), up[index].item()
        u = u if linear_beta is None else linear_beta * math.tanh(u / linear_beta)
        assert out[index].item() == pytest.approx(
            beta * math.tanh(g / beta) / (1 + math.exp(-g)) * u, rel=1e-5, abs=1e-6
        )
    assert out.shape == (7, 12)


def test_situ_does_not_depend_on_the_default_dtype() -> None:
    """Engines change it while they build a model; 3.3 is no number of bfloat16."""
    gate_up = torch.randn(3, 10)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = situ_and_mul(gate_up, 3.3, 21.7)
    finally:
        torch.set_default_dtype(default)
    gate, up = gate_up.chunk(2, dim=-1)
    assert_close(out, 3.3 * torch.tanh(gate / 3.3) * gate.sigmoid() * 21.7 * torch.tanh(up / 21.7), 1e-6)


def test_situ_is_computed_in_fp32() -> None:
    gate_up = (torch.randn(5, 16) * 10).bfloat16()
    assert torch.equal(situ_and_mul(gate_up, 4.0, 25.0), situ_and_mul(gate_up.float(), 4.0, 25.0).bfloat16())


def test_a_beta_of_none_is_silu() -> None:
    gate, up = torch.randn(2, 7, 12)
    assert_close(gated_activation(torch.cat([gate, up], dim=-1), None, None), F.silu(gate) * up, 1e-6)


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.5])
def test_rms_norms(eps: float) -> None:
    x, residual, weight, gate = torch.randn(4, 3, 8), torch.randn(4, 3, 8), torch.randn(8), torch.randn(4, 3, 8)

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight

    assert_close(rms_norm(x, weight, eps), normed(x), 1e-6)
    y, total = add_rms_norm(x, residual, weight, eps)
    assert torch.equal(total, x + residual)
    assert_close(y, normed(total), 1e-6)
    assert_close(gated_rms_norm(x, gate, weight, eps), normed(x) * torch.sigmoid(gate), 1e-6)


def test_norms_of_bf16_round_once() -> None:
    x, weight, gate = torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16(), torch.randn(4, 8).bfloat16()
    exact = rms_norm(x.float(), weight.float(), 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), exact.bfloat16())
    assert torch.equal(gated_rms_norm(x, gate, weight, 1e-5), (exact * gate.float().sigmoid()).bfloat16())


# --- attention residuals ---


def mixture(prefix: Tensor, bank: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Token by token, row by row: scores from normed rows, the mixture of the raw ones."""
    out = []
    for last, earlier in zip(prefix.double(), bank.double(), strict=True):
        rows = [*earlier, last]
        scores = torch.stack([(row / (row.square().mean() + eps).sqrt() * weight.double()).sum() for row in rows])
        out.append(sum(share * row for share, row in zip(scores.softmax(0), rows, strict=True)))
    return torch.stack(out)


@pytest.mark.parametrize("B", range(1, 9))
def test_residual_mixture(B: int) -> None:
    prefix, bank, weight = torch.randn(5, 16), torch.randn(5, B, 16) * 3, torch.randn(16)
    assert_close(mix_residuals(prefix, bank, weight, 1e-5), mixture(prefix, bank, weight, 1e-5))


def test_residual_mixture_in_bf16_rounds_once() -> None:
    prefix, bank, weight = torch.randn(5, 16).bfloat16(), torch.randn(5, 3, 16).bfloat16(), torch.randn(16)
    out = mix_residuals(prefix, bank, weight, 1e-5)
    assert out.dtype == torch.bfloat16
    # half a unit in the last place of bf16, at values below 4
    assert_close(out.float(), mixture(prefix, bank, weight, 1e-5), 2**-7)


def test_residual_mixture_of_a_zero_row_and_of_no_tokens() -> None:
    bank, weight = torch.randn(2, 3, 16), torch.randn(16)
    assert_close(mix_residuals(torch.zeros(2, 16), bank, weight, 1e-5), mixture(torch.zeros(2, 16), bank, weight, 1e-5))
    assert mix_residuals(torch.zeros(0, 16), torch.zeros(0, 3, 16), weight, 1e-5).shape == (0, 16)


# --- routing ---


def routed(
    logits: Tensor, bias: Tensor, top_k: int, groups: int, kept: int, renormalize: bool, scaling: float, sigmoid: bool
) -> list[dict[int, float]]:
    """Expert -> weight for each token, as the published gate does it."""
    out = []
    for row in logits.double():
        scores = torch.sigmoid(row) if sigmoid else torch.softmax(row, 0)
        choice = (scores + bias.double()).tolist()
        size = len(choice) // groups
        if groups > 1:
            best_two = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
            taking_part = sorted(range(groups), key=lambda g: -best_two[g])[:kept]
            choice = [c if e // size in taking_part else 0.0 for e, c in enumerate(choice)]
        chosen = sorted(range(len(choice)), key=lambda e: -choice[e])[:top_k]
        weights = {e: scores[e].item() for e in chosen}
        total = sum(weights.values()) + 1e-20 if renormalize and top_k > 1 else 1.0
        out.append({e: weight / total * scaling for e, weight in weights.items()})
    return out


@pytest.mark.parametrize("sigmoid", [True, False], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize(("renormalize", "scaling"), [(True, 1.0), (False, 2.5), (True, 2.446)])
@pytest.mark.parametrize(
    ("top_k", "groups", "kept"), [(4, 1, 1), (4, 4, 2), (1, 1, 1), (6, 3, 1), (16, 1, 1), (3, 8, 8)]
)
def test_routing(top_k: int, groups: int, kept: int, renormalize: bool, scaling: float, sigmoid: bool) -> None:
    experts = 18 if groups == 3 else 16
    logits, bias = torch.randn(50, experts), torch.rand(experts)
    weights, ids = route(logits, bias, top_k, groups, kept, renormalize, scaling, sigmoid)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    expected = routed(logits, bias, top_k, groups, kept, renormalize, scaling, sigmoid)
    for token in range(50):
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx(expected[token], abs=1e-6)


def test_experts_of_groups_left_out_count_as_zero() -> None:
    """So with a bias far below zero they are picked before those of the groups that take part. Odd, and published."""
    logits, bias = torch.tensor([[2.0, 2.0, 0.0, 0.0]]), torch.full((4,), -3.0)
    _, ids = route(logits, bias, 2, 2, 1, True, 1.0, True)
    assert sorted(ids[0].tolist()) == [2, 3]


def test_ties_still_pick_different_experts() -> None:
    weights, ids = route(torch.zeros(3, 16), torch.zeros(16), 4, 1, 1, True, 1.0, True)
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert_close(weights, torch.full((3, 4), 0.25))


def test_the_bias_picks_and_does_not_weigh() -> None:
    logits, bias = torch.tensor([[0.0, 3.0, 3.0]]), torch.tensor([10.0, 0.0, 0.1])
    weights, ids = route(logits, bias, 2, 1, 1, False, 1.0, True)
    got = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert got == pytest.approx({0: 0.5, 2: 1 / (1 + math.exp(-3.0))})


def test_routing_no_tokens() -> None:
    weights, ids = route(torch.empty(0, 16), torch.zeros(16), 4, 4, 2, True, 1.0, True)
    assert weights.shape == ids.shape == (0, 4)


# --- experts ---


def expert_weights(E: int, I: int, H: int) -> tuple[Tensor, Tensor]:
    return torch.randn(E, 2 * I, H) * 0.3, torch.randn(E, H, I) * 0.3


def dense_experts(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, first: int, *betas: Any) -> Tensor:
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        for weight, e in zip(weights[token], (ids[token] - first).tolist(), strict=True):
            if 0 <= e < len(w2):
                out[token] += weight * (w2[e] @ gated_activation(w13[e] @ row, *betas))
    return out


def listed(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The arguments of the operator: each matrix is a list of the tensors that hold it."""
    return x, weights, ids, [w13], [w2], False, *rest


@pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, None)])
@pytest.mark.parametrize("T", [0, 1, 2, FEW_TOKENS, FEW_TOKENS + 1, 40])
@pytest.mark.parametrize("compiling", [False, True])
def test_experts(
    T: int, betas: tuple[float | None, float | None], compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, weights, ids = torch.randn(T, 8), torch.rand(T, 3), torch.rand(T, 6).argsort(dim=-1)[:, :3]
    w13, w2 = expert_weights(6, 5, 8)
    args = (x, weights, ids, w13, w2, 0, *betas)
    assert_close(moe_experts(*listed(*args)), dense_experts(*args))


def test_all_tokens_to_one_expert() -> None:
    x, weights, ids = torch.randn(20, 8), torch.rand(20, 1), torch.full((20, 1), 4)
    w13, w2 = expert_weights(6, 5, 8)
    args = (x, weights, ids, w13, w2, 0, 4.0, 25.0)
    assert_close(moe_experts(*listed(*args)), dense_experts(*args))


@pytest.mark.parametrize("T", [FEW_TOKENS, 20])
@pytest.mark.parametrize("compiling", [False, True])
def test_experts_held_elsewhere_contribute_nothing(T: int, compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts 2..4 of 8 are here; the shares of three holders add up to the whole."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    x, weights, ids = torch.randn(T, 8), torch.rand(T, 3), torch.rand(T, 8).argsort(dim=-1)[:, :3]
    w13, w2 = expert_weights(8, 5, 8)
    part = (x, weights, ids, w13[2:5], w2[2:5], 2, 4.0, 25.0)
    assert_close(moe_experts(*listed(*part)), dense_experts(*part))
    elsewhere = (ids < 2) | (ids > 4)
    assert not moe_experts(*listed(*part))[elsewhere.all(dim=1)].any()
    shares = [
        moe_experts(x, weights, ids, [w13[a:b]], [w2[a:b]], False, a, 4.0, 25.0) for a, b in ((0, 2), (2, 5), (5, 8))
    ]
    assert_close(sum(shares[1:], shares[0]), moe_experts(x, weights, ids, [w13], [w2], False, 0, 4.0, 25.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_experts_are_the_plain_ones(dtype: torch.dtype) -> None:
    """Bit for bit: MXFP4 values are exact in both dtypes, and the same products follow."""
    E, I, H = 5, 32, 64
    packed = [
        [
            torch.randint(256, (E, N, K // 2), dtype=torch.uint8),
            torch.randint(118, 126, (E, N, K // 32), dtype=torch.uint8),
        ]
        for N, K in ((2 * I, H), (H, I))
    ]
    w13, w2 = (mxfp4_dequantize(*matrix, dtype) for matrix in packed)
    x, weights = torch.randn(9, H).to(dtype), torch.rand(9, 2)
    ids = torch.rand(9, 8).argsort(dim=-1)[:, :2] + 1
    out = moe_experts_mxfp4(x, weights, ids, *packed, False, 2, 4.0, 25.0)
    assert out.dtype == dtype
    assert torch.equal(out, moe_experts(x, weights, ids, [w13], [w2], False, 2, 4.0, 25.0))


# --- attention ---

QUERIES, KEYS = [3, 1, 0, 20], [3, 9, 4, 33]


def causal_mask(queries: int, keys: int) -> Tensor:
    """The last query sees every key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


@pytest.fixture(params=["whole", "blocks of 2 rows", "200 scores, 3 rows of the longest", "1 score"])
def query_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query rows taken together."""
    whole = (attention_module.BLOCK, attention_module.MAX_SCORES)
    sizes = {"blocks of 2 rows": (2, whole[1]), "200 scores, 3 rows of the longest": (64, 200), "1 score": (64, 1)}
    for name, size in zip(("BLOCK", "MAX_SCORES"), sizes.get(request.param, whole), strict=True):
        monkeypatch.setattr(attention_module, name, size)


@pytest.mark.usefixtures("query_blocks")
def test_causal_attention() -> None:
    heads, D, V = 2, 6, 5
    q, k, v = torch.randn(sum(QUERIES), heads, D), torch.randn(sum(KEYS), heads, D), torch.randn(sum(KEYS), heads, V)
    out = causal_attention(q, k, v, QUERIES, KEYS, 0.3)
    parts = zip(out.split(QUERIES), q.split(QUERIES), k.split(KEYS), v.split(KEYS), strict=True)
    for got, queries, keys, values in parts:
        if len(queries):
            mask = causal_mask(len(queries), len(keys))
            one = [x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values)]
            expected = F.scaled_dot_product_attention(*one, attn_mask=mask, scale=0.3)[0].transpose(0, 1)
            assert_close(got, expected, 1e-6)


def pools(slots: int = 5, capacity: int = 40, R: int = 7, r: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(slots, capacity, R), torch.randn(slots, capacity, r)


@pytest.mark.usefixtures("query_blocks")
def test_latent_attention_is_the_expanded_form() -> None:
    """Absorbing W_kc into the query and W_vc into the output changes the order of products, not the function."""
    heads, n, r, R, v = 2, 4, 3, 7, 5
    slots = [4, 0, 3, 1]
    latent, rope = pools(R=R, r=r)
    w_kc, w_vc = torch.randn(heads, n, R), torch.randn(heads, R, v)
    q = torch.randn(sum(QUERIES), heads, n + r)
    q_latent = einsum("thn,hnR->thR", q[..., :n], w_kc)
    out = latent_attention(q_latent, q[..., n:], latent, rope, slots, QUERIES, KEYS, 0.3)
    rows = [(latent[slot, :length], rope[slot, :length]) for slot, length in zip(slots, KEYS, strict=True)]
    c, shared = (torch.cat(parts) for parts in zip(*rows, strict=True))
    keys = torch.cat([einsum("tR,hnR->thn", c, w_kc), shared.unsqueeze(1).expand(-1, heads, -1)], dim=-1)
    expected = causal_attention(q, keys, einsum("tR,hRv->thv", c, w_vc), QUERIES, KEYS, 0.3)
    assert_close(einsum("thR,hRv->thv", out, w_vc), expected)


@pytest.mark.parametrize("lengths", [[40, 1, 17], [5, 5, 5]])
def test_decoding_neighbouring_slots_at_once(lengths: list[int]) -> None:
    """Slots in a row are read in place, others one by one: the order of the batch decides, the result may not."""
    latent, rope = pools()
    q_latent, q_rope = torch.randn(3, 2, 7), torch.randn(3, 2, 3)
    ones = [1, 1, 1]
    together = latent_attention(q_latent, q_rope, latent, rope, [1, 2, 3], ones, lengths, 0.3)
    order = [2, 0, 1]
    slots, kv_lens = [order[i] + 1 for i in range(3)], [lengths[i] for i in order]
    one_by_one = latent_attention(q_latent[order], q_rope[order], latent, rope, slots, ones, kv_lens, 0.3)
    assert_close(together[order], one_by_one, 1e-6)


def test_attention_over_nothing() -> None:
    latent, rope = pools()
    empty = torch.empty(0, 2, 7), torch.empty(0, 2, 3)
    assert latent_attention(*empty, latent, rope, [], [], [], 0.3).shape == (0, 2, 7)
    assert latent_attention(*empty, latent, rope, [1, 0], [0, 0], [4, 0], 0.3).shape == (0, 2, 7)
    assert causal_attention(empty[0], empty[0], torch.empty(0, 2, 5), [], [], 0.3).shape == (0, 2, 5)


# --- what holds for every operator ---

T, S, h, K, V, E, H, I = 9, 2, 2, 8, 6, 5, 32, 64


def _bytes(*shape: int) -> Tensor:
    return torch.randint(118, 126, shape, dtype=torch.uint8)


def _kda(sequences: int) -> tuple[Tensor, ...]:
    per_token = torch.randn(T, h, K), torch.randn(T, h, K), torch.randn(T, h, V), -torch.rand(T, h, K), torch.rand(T, h)
    return (*per_token, torch.randn(sequences, h, K, V))


def _routed() -> tuple[Tensor, ...]:
    return torch.randn(T, H), torch.rand(T, 2), torch.randint(E, (T, 2))


SAMPLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "short_conv": lambda: (torch.randn(T, 6), torch.randn(6, 4), torch.randn(S, 3, 6), [4, 5]),
    "kda_gate": lambda: (torch.randn(T, h, K), torch.randn(h), torch.randn(h, K), -5.0),
    "kda_step": lambda: _kda(T),
    "kda_recurrent": lambda: (*_kda(S), [4, 5]),
    "kda_chunk": lambda: (*_kda(S), [4, 5]),
    "rms_norm": lambda: (torch.randn(T, H), torch.randn(H), 1e-5),
    "add_rms_norm": lambda: (torch.randn(T, H), torch.randn(T, H), torch.randn(H), 1e-5),
    "mix_residuals": lambda: (torch.randn(T, H), torch.randn(T, 3, H), torch.randn(H), 1e-5),
    "route": lambda: (torch.randn(T, 8), torch.randn(8), 2, 2, 1, True, 2.5, True),
    "situ_and_mul": lambda: (torch.randn(T, 2 * I), 4.0, 25.0),
    "moe_experts": lambda: listed(*_routed(), *expert_weights(E, I, H), 0, 4.0, 25.0),
    "moe_experts_mxfp4": lambda: (
        *_routed(),
        *([_bytes(E, N, K // 2), _bytes(E, N, K // 32)] for N, K in ((2 * I, H), (H, I))),
        *(False, 0, 4.0, 25.0),
    ),
    "causal_attention": lambda: (
        *(torch.randn(T, h, K), torch.randn(T + 3, h, K), torch.randn(T + 3, h, V)),
        *([4, 5], [4, 8], 0.3),
    ),
    "latent_attention": lambda: (
        *(torch.randn(T, h, K), torch.randn(T, h, 2), torch.randn(3, 8, K), torch.randn(3, 8, 2)),
        *([2, 0], [4, 5], [4, 8], 0.3),
    ),
}
#: Which experts are hit, and by how many tokens, decides what is launched: no fake tensor can know.
DATA_DEPENDENT = {"moe_experts_mxfp4"}


def operator(name: str) -> Any:
    return getattr(torch.ops.kimi_k3, name).default


def test_every_operator_of_these_modules_has_a_sample() -> None:
    modules = {kda.__name__, kda_chunk.__name__, attention_module.__name__} | {
        f"kimi_k3_npu.ops.{name}" for name in ("norm", "residual", "routing", "situ", "experts")
    }
    assert {name for name, op in OPS.items() if op.reference.__module__ in modules} == set(SAMPLES)


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    """The two utilities that apply to composite kernels, which need no autograd registration of their own.

    Both see the operations that such a kernel is made of, not the operator; hence the tests of whole operators below.
    """
    torch.library.opcheck(operator(name), SAMPLES[name](), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", SAMPLES)
def test_fake_tensors_have_the_real_shapes(name: str) -> None:
    args = SAMPLES[name]()
    with FakeTensorMode() as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, args)
        if name in DATA_DEPENDENT:
            with pytest.raises(DataDependentOutputException):
                operator(name)(*fake)
            return
        imagined = operator(name)(*fake)
    real = operator(name)(*args)
    for a, b in zip(*((x,) if isinstance(x, Tensor) else x for x in (imagined, real)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize("name", SAMPLES)
def test_inputs_are_neither_changed_nor_returned(name: str) -> None:
    args = SAMPLES[name]()
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    out = operator(name)(*args)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert not any(
        result.untyped_storage().data_ptr() in storages for result in ((out,) if isinstance(out, Tensor) else out)
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_gradients_flow(name: str) -> None:
    args = [
        arg.requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in SAMPLES[name]()
    ]
    out = operator(name)(*args)
    differentiable = [x for x in ((out,) if isinstance(out, Tensor) else out) if x.requires_grad]
    assert differentiable
    sum(x.sum() for x in differentiable).backward()
    # the router's bias only picks
    leaves = [
        arg for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad and (name, i) != ("route", 1)
    ]
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
