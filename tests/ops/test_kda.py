"""Kimi Delta Attention: the chunked form and the step are the recurrence, for any decay, length, split and start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, einsum

from kimi_k3_npu.ops.kda import kda_gate, kda_recurrent, kda_step, l2_norm, short_conv
from kimi_k3_npu.ops.kda_chunk import SIZE, kda_chunk

# h heads, K key and V value dimensions, deliberately different; T tokens, S sequences
h, K, V = 3, 16, 24

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

#: Log-decay [T, h, K] by name. K3's gate lies in (-5, 0), so `strong` is its limit: e^-320 over a chunk of 64 tokens.
#: Kimi-Linear's gate has no bound; after -60 nothing of the state is left in fp32.
DECAYS: dict[str, Callable[[int], Tensor]] = {
    "none": lambda T: torch.zeros(T, h, K),
    "weak": lambda T: -0.02 * torch.rand(T, h, K),
    "strong": lambda T: torch.full((T, h, K), -5.0),
    "mixed": lambda T: -5 * torch.rand(T, h, K),
    "bursts": lambda T: (torch.arange(T) // 7 % 3 == 1).float().mul(-5).view(T, 1, 1).repeat(1, h, K),
    "unbounded": lambda T: torch.full((T, h, K), -60.0),
    "unbounded, rare": lambda T: -60 * torch.rand(T, h, K) ** 6,
}
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 130, 1025)


def inputs(T: int, decay: str, sequences: int = 1) -> Inputs:
    """q, k, v, g, beta and states as the layer makes them: q and k of unit length, q scaled, beta in (0, 1)."""
    q, k, v = l2_norm(torch.randn(T, h, K)) * K**-0.5, l2_norm(torch.randn(T, h, K)), torch.randn(T, h, V)
    return q, k, v, DECAYS[decay](T), torch.rand(T, h), torch.randn(sequences, h, K, V)


def exact(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The published recurrence of one sequence, written out in fp64. state [h, K, V]."""
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    outputs = [v[:0]]
    for t in range(len(q)):
        state = state * g[t].exp().unsqueeze(-1)
        error = v[t] - einsum("hkv,hk->hv", state, k[t])
        state = state + einsum("h,hk,hv->hkv", beta[t], k[t], error)
        outputs.append(einsum("hkv,hk->hv", state, q[t]).unsqueeze(0))
    return torch.cat(outputs), state


def exact_batch(case: Inputs, seq_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    *per_token, states = case
    parts = zip(*(x.split(list(seq_lens)) for x in per_token), states, strict=True)
    outputs, ends = zip(*(exact(*part) for part in parts), strict=True)
    return torch.cat(outputs), torch.stack(ends)


def relative_error(o: Tensor, expected: Tensor) -> float:
    """The largest error of a head's output vector, relative to its length."""
    return ((o - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("decay", DECAYS)
def test_both_forms_are_the_recurrence(decay: str, T: int) -> None:
    """In absolute terms, and relative to each head's vector: o is normed afterwards, so a small one counts as much.

    Its relative error is that of the products of q and k, which may cancel; the chunked form may not add to it.
    """
    case = inputs(T, decay)
    expected, end = exact_batch(case, [T])
    errors = []
    for form in (kda_recurrent, kda_chunk):
        o, state = form(*case, [T])
        assert_close(o, expected)
        assert_close(state, end)
        errors.append(relative_error(o, expected) if T else 0.0)
    recurrent, chunk = errors
    assert recurrent < 1e-3
    assert chunk < 3 * recurrent + 2e-6


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk], ids=["recurrent", "chunk"])
@pytest.mark.parametrize("decay", DECAYS)
def test_ragged_batches(form: Callable, decay: str) -> None:
    for seq_lens in ([0, 17, 0, 130, 1], [64, 64], [1, 1, 1], [0, 0], [65, 0], [SIZE - 1, SIZE + 1, 2 * SIZE]):
        case = inputs(sum(seq_lens), decay, len(seq_lens))
        o, states = form(*case, seq_lens)
        expected, ends = exact_batch(case, seq_lens)
        assert_close(o, expected)
        assert_close(states, ends)
        for s, n in enumerate(seq_lens):
            assert n or torch.equal(states[s], case[-1][s])


@pytest.mark.parametrize("form", [kda_recurrent, kda_chunk], ids=["recurrent", "chunk"])
def test_no_sequences(form: Callable) -> None:
    o, states = form(*inputs(0, "weak", 0), [])
    assert o.shape == (0, h, V)
    assert states.shape == (0, h, K, V)


@pytest.mark.parametrize("decay", DECAYS)
def test_step_is_one_token_of_each_sequence(decay: str) -> None:
    case = inputs(4, decay, 4)
    o, states = kda_step(*case)
    expected, ends = exact_batch(case, [1, 1, 1, 1])
    assert_close(o, expected)
    assert_close(states, ends)
    o, states = kda_step(*inputs(0, decay, 0))
    assert o.shape == (0, h, V)
    assert states.shape == (0, h, K, V)


@settings(max_examples=40)
@given(
    pieces=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    decay=st.sampled_from(sorted(DECAYS)),
    forms=st.lists(st.sampled_from([kda_recurrent, kda_chunk]), min_size=5, max_size=5),
)
def test_any_split_into_either_form(pieces: list[int], decay: str, forms: list[Callable]) -> None:
    torch.manual_seed(len(pieces) + sum(pieces))
    *per_token, state = inputs(sum(pieces), decay)
    expected, end = exact_batch((*per_token, state), [sum(pieces)])
    outputs = []
    for form, n, *part in zip(forms, pieces, *(x.split(pieces) for x in per_token), strict=False):
        o, state = form(*part, state, [n])
        outputs.append(o)
    assert_close(torch.cat(outputs), expected)
    assert_close(state, end[0:1])


@pytest.mark.parametrize("decay", DECAYS)
def test_gradients_are_those_of_the_recurrence(decay: str) -> None:
    """Finite, too: where decay leaves nothing, gradients are 0 and not 0 * inf."""
    seq_lens = [70, 0, 17]
    case = inputs(sum(seq_lens), decay, len(seq_lens))
    target = torch.randn(sum(seq_lens), h, V), torch.randn(len(seq_lens), h, K, V)
    gradients = []
    for form in (kda_recurrent, kda_chunk):
        leaves = [x.clone().requires_grad_() for x in case]
        o, states = form(*leaves, seq_lens)
        loss = (o * target[0]).sum() + (states * target[1]).sum()
        gradients.append(torch.autograd.grad(loss, leaves))
    for name, recurrent, chunk in zip(("q", "k", "v", "g", "beta", "state"), *gradients, strict=True):
        assert recurrent.isfinite().all(), name
        assert chunk.isfinite().all(), name
        size = recurrent.abs().max().clamp(min=1)
        torch.testing.assert_close(
            chunk / size, recurrent / size, rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_inputs_are_not_changed() -> None:
    seq_lens = [70, 0, 3]
    case = inputs(73, "mixed", 3)
    x, weight, window = torch.randn(73, 5), torch.randn(5, 4), torch.randn(3, 3, 5)
    before = [tensor.clone() for tensor in (*case, x, weight, window)]
    kda_recurrent(*case, seq_lens)
    kda_chunk(*case, seq_lens)
    kda_step(*(tensor[:3] for tensor in case))
    short_conv(x, weight, window, seq_lens)
    short_conv(x[:3], weight, window, [1, 1, 1])
    kda_gate(case[3], torch.zeros(h), torch.zeros(h, K), -5.0)
    assert all(torch.equal(tensor, old) for tensor, old in zip((*case, x, weight, window), before, strict=True))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("T", [0, 1, 2, 3, 4, 50])
def test_short_conv_is_a_causal_depthwise_convolution(T: int, width: int) -> None:
    channels = 6
    x, weight, window = torch.randn(T, channels), torch.randn(channels, width), torch.randn(1, width - 1, channels)
    history = torch.cat([window[0], x])
    expected = F.silu(F.conv1d(history.t(), weight.unsqueeze(1), groups=channels).t()) if T else x
    y, after = short_conv(x, weight, window, [T])
    assert_close(y, expected, 1e-6)
    assert torch.equal(after[0], history[T:])


@pytest.mark.parametrize("sizes", [(1,) * 20, (7, 0, 13), (2, 18), (0, 20)])
def test_short_conv_in_pieces(sizes: tuple[int, ...]) -> None:
    x, weight, window = torch.randn(20, 6), torch.randn(6, 4), torch.randn(1, 3, 6)
    whole, end = short_conv(x, weight, window, [20])
    pieces = []
    for part in x.split(sizes):
        y, window = short_conv(part, weight, window, [len(part)])
        pieces.append(y)
    assert_close(torch.cat(pieces), whole, 1e-6)
    assert torch.equal(window, end)


@pytest.mark.parametrize("seq_lens", [[3, 0, 5, 1], [2, 2, 2], [1, 1], [0, 0], []])
def test_short_conv_of_a_ragged_batch(seq_lens: list[int]) -> None:
    x, weight, windows = torch.randn(sum(seq_lens), 6), torch.randn(6, 4), torch.randn(len(seq_lens), 3, 6)
    y, after = short_conv(x, weight, windows, seq_lens)
    assert y.shape == x.shape
    assert after.shape == windows.shape
    parts = zip(y.split(seq_lens), after, x.split(seq_lens), windows, seq_lens, strict=True)
    for got, got_window, part, window, n in parts:
        expected, expected_window = short_conv(part, weight, window.unsqueeze(0), [n])
        assert_close(got, expected, 1e-6)
        assert torch.equal(got_window, expected_window[0])


def test_short_conv_sums_in_fp32_and_keeps_dtypes() -> None:
    x, window = torch.randn(9, 6).bfloat16(), torch.randn(1, 3, 6).bfloat16()
    weight = torch.randn(6, 4)
    y, after = short_conv(x, weight, window, [9])
    expected, _ = short_conv(x.float(), weight, window.float(), [9])
    assert torch.equal(y, expected.bfloat16())
    assert after.dtype == torch.bfloat16
    assert torch.equal(after[0], x[-3:])


@pytest.mark.parametrize("total", [-20.0, 0.0, 20.0])
def test_gate_with_a_bound_is_a_sigmoid_and_no_clamp(total: float) -> None:
    A_log = torch.tensor([-1.0, 0.0, 1.5])
    f, dt_bias = torch.full((2, h, K), total - 1), torch.ones(h, K)
    g = kda_gate(f, A_log, dt_bias, -5.0)
    expected = -5 * torch.sigmoid(A_log.double().exp() * total)
    assert_close(g, expected.view(1, h, 1).expand(2, h, K), 1e-6)
    assert (g <= 0).all()
    assert (g >= -5).all()


@pytest.mark.parametrize("total", [-20.0, 0.0, 20.0])
def test_gate_without_a_bound_is_a_softplus(total: float) -> None:
    A_log = torch.tensor([-1.0, 0.0, 1.5])
    f, dt_bias = torch.full((2, h, K), total + 2), torch.full((h, K), -2.0)
    g = kda_gate(f, A_log, dt_bias, None)
    expected = -A_log.double().exp() * torch.tensor(total).double().exp().log1p()
    assert_close(g, expected.view(1, h, 1).expand(2, h, K), 2e-5)


def test_gate_is_fp32_whatever_comes_in() -> None:
    f = torch.randn(4, h, K).bfloat16()
    g = kda_gate(f, torch.randn(h), torch.randn(h, K), -5.0)
    assert g.dtype == torch.float32


def test_l2_norm() -> None:
    x = torch.randn(5, h, K) * torch.logspace(-4, 4, 5).view(5, 1, 1)
    expected = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(l2_norm(x), expected, 1e-6)
    assert not l2_norm(torch.zeros(2, 3)).any()
