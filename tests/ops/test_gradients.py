"""Gradients by autograd through the reference kernels, in fp32, against finite differences of a few lines of fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops.experts import moe_experts
from kimi_k3_npu.ops.kda import kda_gate, kda_recurrent, l2_norm
from kimi_k3_npu.ops.kda_chunk import kda_chunk
from kimi_k3_npu.ops.routing import route

STEP = 1e-5


def finite_differences(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of `function`, a number for inputs without and [P] for inputs with a leading dimension P, for each
    of the fp64 `inputs`: every element is moved up and down by itself."""
    gradients = []
    for i, x in enumerate(inputs):
        moves = STEP * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)

        def moved(to: Tensor, i: int = i) -> Tensor:
            return function(*(to if j == i else other.expand(len(to), *other.shape) for j, other in enumerate(inputs)))

        gradients.append(((moved(x + moves) - moved(x - moves)) / (2 * STEP)).view(x.shape))
    return gradients


def assert_gradients(actual: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    """fp32 against fp64: within 1e-3 of each element, or 1e-4 of the input's largest."""
    for i, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        assert found is not None
        scale = wanted.abs().max().item()
        torch.testing.assert_close(
            found.double(), wanted, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=lambda text, i=i: f"input {i}: {text}"
        )


def kda_in_fp64(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, a_log: Tensor, bias: Tensor, beta: Tensor, state: Tensor,
    *, lower_bound: float | None, lengths: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The recurrence written out: q, k, v, f [..., T, h, K], a_log [..., h], bias [..., h, K], beta [..., T, h],
    state [..., S, h, K, V] -> outputs [..., T, h, V] and states."""
    raw, rate = f + bias.unsqueeze(-3), a_log.exp()[..., None, :, None]
    g = -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    outputs, states, t = [], [], 0
    for s, length in enumerate(lengths):
        current = state[..., s, :, :, :]
        for _ in range(length):
            current = current * g[..., t, :, :].exp().unsqueeze(-1)
            error = v[..., t, :, :] - (k[..., t, :, :].unsqueeze(-2) @ current).squeeze(-2)
            write = beta[..., t, :].sigmoid().unsqueeze(-1) * error
            current = current + k[..., t, :, :].unsqueeze(-1) * write.unsqueeze(-2)
            outputs.append((q[..., t, :, :].unsqueeze(-2) @ current).squeeze(-2))
            t += 1
        states.append(current)
    return torch.stack(outputs, -3), torch.stack(states, -4)


#: Of a gate bounded at -5 (K3) and one without a bound (Kimi-Linear): what is added to the raw gate, and how far the
#: log-decay falls at least over a chunk of 64 tokens. fp32 divides by exp(-87), and by nothing less.
DECAYS: dict[str, tuple[float | None, float, float]] = {
    "bounded, weak": (-5.0, -6.0, 0),
    "bounded, strong": (-5.0, 8.0, 310),
    "unbounded, weak": (None, -4.0, 0),
    "unbounded, strong": (None, 3.0, 150),
    "unbounded, extreme": (None, 90.0, 5000),
}
LENGTHS = (67, 3)  # more than a chunk, and less


@pytest.mark.parametrize("form", [kda_chunk, kda_recurrent], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("decay", DECAYS)
def test_kda(decay: str, form: Callable) -> None:
    lower_bound, shift, least = DECAYS[decay]
    tokens, heads, width = sum(LENGTHS), 2, 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    rows = [draw(tokens, heads, width) for _ in range(4)]
    inputs = [
        *rows[:3], rows[3] + shift, 0.1 * draw(heads), 0.1 * draw(heads, width), draw(tokens, heads),
        draw(len(LENGTHS), heads, width, width),
    ]  # fmt: skip
    weights = draw(tokens, heads, width), draw(len(LENGTHS), heads, width, width)

    def expected(*inputs: Tensor) -> Tensor:
        results = kda_in_fp64(*inputs, lower_bound=lower_bound, lengths=LENGTHS)
        return sum((x * w).flatten(-w.ndim).sum(-1) for x, w in zip(results, weights, strict=True))

    single = [x.float().requires_grad_() for x in inputs]
    q, k, v, f, a_log, bias, beta, state = single
    g = kda_gate(f, a_log, bias, lower_bound)
    assert -g[:64].sum(0).max() >= least
    results = form(l2_norm(q), l2_norm(k), v, g, beta.sigmoid(), state, LENGTHS)
    loss = sum((x * w.float()).sum() for x, w in zip(results, weights, strict=True))
    loss.backward()
    assert_gradients([x.grad for x in single], finite_differences(expected, inputs))


def test_dividing_by_the_decay_would_not_do() -> None:
    """What the chunked form avoids, so that the test above means something: at a log-decay of -90 over a chunk, which
    both gates reach, 1 / exp(G) has no gradient in fp32."""
    g = torch.tensor([-90.0], requires_grad=True)
    (1 / g.exp() * 0).sum().backward()
    assert g.grad is not None
    assert g.grad.isnan().all()


@pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, None), (None, None)], ids=["situ", "situ, linear up", "silu"])
def test_router_and_experts(betas: tuple[float | None, float | None]) -> None:
    tokens, experts, top_k, outer, inner, scaling = 6, 5, 2, 4, 3, 2.5
    x, logits = torch.randn(tokens, outer).double(), torch.randn(tokens, experts).double()
    w13, w2 = torch.randn(experts, 2 * inner, outer).double(), torch.randn(experts, outer, inner).double()
    bias, weight = 0.1 * torch.randn(experts), torch.randn(tokens, outer).double()
    chosen = (logits.sigmoid() + bias).topk(top_k).indices
    visits = torch.zeros(tokens, experts, dtype=torch.float64).scatter(1, chosen, 1.0)

    def expected(x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        beta, linear_beta = betas
        shares = logits.sigmoid() * visits  # [..., T, E]
        shares = scaling * shares / shares.sum(-1, keepdim=True)
        gate, up = torch.einsum("...th,...eih->...tei", x, w13).chunk(2, dim=-1)
        gate = gate * gate.sigmoid() if beta is None else beta * (gate / beta).tanh() * gate.sigmoid()
        up = up if linear_beta is None else linear_beta * (up / linear_beta).tanh()
        out = torch.einsum("...te,...tei,...ehi->...th", shares, gate * up, w2)
        return (out * weight).flatten(-2).sum(-1)

    inputs = [x, logits, w13, w2]
    single = [tensor.float().requires_grad_() for tensor in inputs]
    shares, ids = route(single[1], bias, top_k, 1, 1, True, scaling, True)
    assert ids.sort().values.tolist() == chosen.sort().values.tolist()
    out = moe_experts(single[0], shares, ids, [single[2]], [single[3]], False, 0, *betas)
    (out * weight.float()).sum().backward()
    assert_gradients([tensor.grad for tensor in single], finite_differences(expected, inputs))
    idle = visits.sum(0) == 0
    assert single[2].grad is not None
    assert not single[2].grad[idle].any()
