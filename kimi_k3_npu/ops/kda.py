"""Kimi Delta Attention: short convolution, decay gate, and the gated delta rule, token by token.

Letters: T tokens of S sequences laid end to end, h heads, K key and V value dimensions.
The state of a head is fp32 [K, V]; g is log-decay per key dimension (<= 0), beta the write strength in (0, 1):

    S <- diag(exp g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q        (q and k normed, q scaled)

Functions return new states and never write to the ones they are given.

torch_npu's own delta-rule operators do not do: the recurrent one refuses a decay per key dimension, the chunked one has
only a decay per head, and its causal convolutions are 3 wide where this one is 4. Of sgl_kernel_npu's are left out: its
convolutions, which round the weights to bfloat16 and own the windows; its decode and verify kernels, which norm q and k
themselves; and the single steps of its chunked form, whose releases disagree on whether decays are powers of e or of 2.
`chunk_kda_fwd` is the whole chunked form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops import sgl
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import FLOATS, OFFSET_LIMIT, no_kernel, nothing_to_run, wrong_dtype
from kimi_k3_npu.ops.op import operator


@operator("short_conv(Tensor x, Tensor weight, Tensor window, SymInt[] seq_lens) -> (Tensor, Tensor)")
def short_conv(x: Tensor, weight: Tensor, window: Tensor, seq_lens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution over time, then SiLU.

    x [T, c], weight fp32 [c, W] (the last column meets the current token), window [S, W-1, c]: the inputs just before
    each sequence's first token here. Returns the result [T, c] in x's dtype and the next windows [S, W-1, c].
    """
    if not x.shape[0]:
        return torch.empty_like(x), window.clone()

    def convolve(history: Tensor, tokens: int) -> Tensor:  # [..., W-1+n, c] -> [..., n, c]
        if tokens == 1:
            return F.silu((history * weight.t()).sum(dim=-2, keepdim=True))
        first, *columns = weight.t().contiguous()  # W of [c]
        y = history[..., :tokens, :] * first
        for j, column in enumerate(columns, start=1):
            y.addcmul_(history[..., j : j + tokens, :], column)
        return F.silu(y)

    if _uniform(seq_lens):
        tokens = seq_lens[0]
        history = torch.cat([window, x.view(len(seq_lens), tokens, -1)], dim=1).float()
        return convolve(history, tokens).flatten(0, 1).to(x.dtype), history[:, tokens:].to(window.dtype)
    histories = [torch.cat([w, part]).float() for w, part in zip(window, x.split(list(seq_lens)), strict=True)]
    y = torch.cat([convolve(history, n) for history, n in zip(histories, seq_lens, strict=True)])
    windows = torch.stack([history[n:] for history, n in zip(histories, seq_lens, strict=True)])
    return y.to(x.dtype), windows.to(window.dtype)


@operator("kda_gate(Tensor f, Tensor A_log, Tensor dt_bias, float? lower_bound) -> Tensor")
def kda_gate(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log-decay, fp32 [T, h, K], from the raw gate f [T, h, K], A_log fp32 [h] and dt_bias fp32 [h, K].

    With a bound (K3: -5): bound * sigmoid(exp(A_log) * (f + dt_bias)), which lies in (bound, 0) and is not a clamp.
    Without (Kimi-Linear): -exp(A_log) * softplus(f + dt_bias).
    """
    rate = A_log.exp().unsqueeze(-1)
    raw = f.float() + dt_bias
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * raw)
    return -rate * F.softplus(raw)


def l2_norm(x: Tensor) -> Tensor:
    """x * rsqrt(sum(x^2) + 1e-6) over the last dimension, in fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + 1e-6)


def normed_qkv(mixed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The convolved [T, 3hd] -> q, k, v [T, h, d]: q and k of unit length in fp32, q scaled by d^-0.5."""
    mixed = mixed.unflatten(-1, (3, heads, -1))
    q, k = l2_norm(mixed[:, :2]).unbind(1)
    return q * mixed.shape[-1] ** -0.5, k, mixed[:, 2]


@operator("kda_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state) -> (Tensor, Tensor)")
def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence: q, k, g [S, h, K], v [S, h, V], beta [S, h], state [S, h, K, V]; fp32, v any.

    Returns o [S, h, V] and the next state. o = q S' is formed from the old state, (q exp g) S + (q . k) u, so that one
    product serves it and the prediction of v.
    """
    decay = g.exp()
    read = torch.stack([k, q], dim=-2) * decay.unsqueeze(-2)  # [S, h, 2, K]
    predicted, carried = (read @ state).unbind(-2)
    write = beta.unsqueeze(-1) * (v - predicted)  # [S, h, V]
    o = carried + (q * k).sum(-1, keepdim=True) * write
    return o, torch.addcmul(state * decay.unsqueeze(-1), k.unsqueeze(-1), write.unsqueeze(-2))


@operator(
    "kda_recurrent(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, SymInt[] seq_lens)"
    " -> (Tensor, Tensor)"
)
def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Any number of tokens of each sequence, one at a time: the definition that the chunked form is held against.

    q, k, g [T, h, K], v [T, h, V], beta [T, h], state [S, h, K, V], fp32 but for v, which may have the dtype that the
    model computes in. Returns o [T, h, V] and the next states, fp32.
    """
    v = v.float()
    outputs, states = [], []
    for s, tokens in enumerate(_token_ranges(seq_lens)):
        current = state[s : s + 1]
        for t in tokens:
            now = slice(t, t + 1)
            o, current = kda_step(q[now], k[now], v[now], g[now], beta[now], current)
            outputs.append(o)
        states.append(current)
    return torch.cat([*outputs, v[:0]]), torch.cat([*states, state[:0]])


def _token_ranges(lengths: Sequence[int]) -> list[range]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [range(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def _uniform(seq_lens: Sequence[int]) -> bool:
    return len(seq_lens) > 0 and all(n == seq_lens[0] for n in seq_lens)


@dataclass(frozen=True)
class Gate:
    """One decay gate of `tokens` tokens on one device."""

    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    device: Device


@kda_gate.case(Gate)
def _gate_case(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> tuple:
    return *f.shape, f.dtype


def refuse_gate(case: Gate) -> str | None:
    """The limits of fused_kda_gate_npu."""
    if reason := nothing_to_run(case.device, case.tokens) or no_kernel(case.device, sgl.KDA_GATE):
        return reason
    elements = case.tokens * case.heads * case.width
    if elements >= OFFSET_LIMIT:
        return f"{elements} elements, must be below 2^31: offsets are counted in 32 bits"
    return wrong_dtype("f", case.dtype, FLOATS)


@kda_gate.kernel("sgl_kda_gate", refuse_gate)
def gate(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    kernel = sgl.kernel(sgl.KDA_GATE)
    return kernel(
        f.contiguous().flatten(1), A_log, f.shape[2], gate_bias=dt_bias.contiguous().flatten(), lower_bound=lower_bound
    )
