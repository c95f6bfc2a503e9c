"""Kimi Delta Attention: short convolution, decay gate, and the gated delta rule, token by token and in chunks.

Letters: T tokens of S sequences laid end to end, h heads, K key and V value dimensions, C tokens of a chunk.
The state of a head is fp32 [K, V]; g is log-decay per key dimension (<= 0), beta the write strength in (0, 1):

    S <- diag(exp g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q        (q and k normed, q scaled)

Functions return new states and never write to the ones they are given.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops.device import current as current_device
from kimi_k3_npu.ops.fused_kda import CHUNK, Chunked, Gate, chunk, gate, refuse_chunk, refuse_gate
from kimi_k3_npu.ops.limits import takes_anything
from kimi_k3_npu.ops.registry import define, npu_kernel, reference
from kimi_k3_npu.ops.select import Candidate, Choice, choose

#: Decay beyond this is taken as this. It weighs nothing beside what a token writes itself, and what it multiplies stays
#: clear of subnormal numbers, on which a CPU is many times slower.
LEAST = 1e-30
#: Tokens of a chunk. A longer one has fewer states to carry and more products within.
SIZE = 32


@define("short_conv(Tensor x, Tensor weight, Tensor window, SymInt[] seq_lens) -> (Tensor, Tensor)")
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


@define("kda_gate(Tensor f, Tensor A_log, Tensor dt_bias, float? lower_bound) -> Tensor")
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


@define("kda_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state) -> (Tensor, Tensor)")
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


@define(
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


@define(
    "kda_chunk(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, SymInt[] seq_lens)"
    " -> (Tensor, Tensor)"
)
def kda_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The same function as `kda_recurrent`, a chunk of tokens at a time.

    Inside a chunk, with G the sum of g since its start, the writes u solve a unit lower-triangular system:

        (I + tril(diag(beta) A, -1)) u = diag(beta) (v - (k exp G) S),      A_ij = sum_k k_ik exp(G_i - G_j) k_jk

    (the WY form of the delta rule). Everything but the chain of states from chunk to chunk is done for all chunks at
    once.
    """
    return kda_in_chunks(q, k, v, g, beta, state, seq_lens, SIZE)


def kda_in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int], size: int
) -> tuple[Tensor, Tensor]:
    """`kda_chunk` in chunks of `size` tokens, a power of two."""
    v = v.float()
    if not q.shape[0]:
        return torch.zeros_like(v), state.clone()
    chunks = [-(-n // size) for n in seq_lens]
    q, k, v, g, beta = (_into_chunks(x, seq_lens, chunks, size) for x in (q, k, v, g, beta.unsqueeze(-1)))  # [N,h,C,.]
    scores, attention, until, after = _decayed_products(k, q, g)

    reads = torch.cat([beta * until * k, until * q], dim=-2)
    inverse = unit_lower_inverse(beta * scores)
    outputs, states = _chain(reads, beta * v, inverse, attention, after * k, until[..., -1, :], state, chunks)
    return _out_of_chunks(outputs, seq_lens, chunks), states


def _chain(
    reads: Tensor,
    own: Tensor,
    inverse: Tensor,
    attention: Tensor,
    outgoing_k: Tensor,
    decay: Tensor,
    state: Tensor,
    chunks: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Carry the states from chunk to chunk: the only sequential part.

    reads [N, h, 2C, K] = what each chunk takes from its incoming state, first against its writes, then for its outputs;
    own [N, h, C, V] = what it would write without; inverse and attention [N, h, C, C]; outgoing_k [N, h, C, K] = keys
    as the chunk's end sees them; decay [N, h, K] = what a chunk leaves of its state. Returns the outputs [N, h, C, V]
    and the final states.
    """
    size = own.shape[-2]
    parts = (reads, own, inverse, attention, outgoing_k.transpose(-1, -2), decay.unsqueeze(-1))
    steps = zip(*(x.unbind() for x in parts), strict=True)
    outputs, finals = [], []
    for current, count in zip(state.unbind(), chunks, strict=True):
        for read, would_write, solve, attend, keys, left in islice(steps, count):
            against, carried = (read @ current).split(size, dim=1)  # [h, C, V] each
            writes = solve @ (would_write - against)
            outputs.append(torch.baddbmm(carried, attend, writes))
            current = torch.baddbmm(left * current, keys, writes)
        finals.append(current)
    return torch.stack(outputs), torch.stack(finals)


def _decayed_products(k: Tensor, q: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sum_k r_ik exp(G_i - G_j) k_jk, zero above the diagonal, of r = k for j < i and of r = q for j <= i; and the
    decay over each chunk until a token, its own included, and after it. k, q, g and decays [N, h, C, K], products
    [N, h, C, C].

    exp(G_i - G_j) is split at a point m between j and i into exp(G_i - G_m) exp(G_m - G_j). Both factors are at most
    1, so nothing overflows however strong the decay is, bounded gate or not. Two neighbouring blocks of tokens share
    such a point, their border; doubling the blocks from single tokens to C/2 covers every pair, with one batched
    product a size. The decays within blocks grow along as products, which keep the relative precision that the
    exponential of a long sum has lost.
    """
    size = g.shape[-2]
    scores, attention = k.new_zeros(*k.shape[:-1], size), torch.diag_embed((q * k).sum(dim=-1))
    until = g.exp().clamp(min=LEAST)  # within blocks
    after = torch.ones_like(until)
    block = 1
    while block < size:
        (early_until, late_until), early_after = _halves(until, block), _halves(after, block)[0]
        early_k, late_k = _halves(k, block)
        early = (early_k * early_after).transpose(-1, -2)
        for product, late in ((scores, late_k), (attention, _halves(q, block)[1])):
            _diagonal_blocks(product, 2 * block)[..., block:, :block] = (late * late_until) @ early
        over_early, over_late = early_until[..., -1:, :], late_until[..., -1:, :]
        if g.requires_grad:  # the gradients need what the products have seen
            until, after = until.clone(), after.clone()
        _halves(after, block)[0].mul_(over_late).clamp_(min=LEAST)
        _halves(until, block)[1].mul_(over_early).clamp_(min=LEAST)
        block *= 2
    return scores, attention, until, after


def _halves(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of neighbouring blocks of tokens, [N, h, C, d] -> two views [N, h, n,
    block, d]."""
    blocks = x.unflatten(-2, (-1, 2, block))
    return blocks.select(-3, 0), blocks.select(-3, 1)


def _pairs(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second of each pair of neighbours: [..., 2n, i, j] -> two of [..., n, i, j]."""
    return blocks[..., ::2, :, :], blocks[..., 1::2, :, :]


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """A view of the blocks on the diagonal of square matrices: [..., C, C] -> [..., C/size, size, size]."""
    blocks = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))  # [..., C/size, size, C/size, size]
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """The inverse of I + tril(lower, -1), [..., C, C] with C a power of two, by batched products.

    The inverse of [[A, 0], [L, B]] is [[A', 0], [-B' L A', B']] with A' and B' those of A and B. Doubling the blocks
    from single elements to C/2, each size is one pair of products for all blocks. This is forward substitution in
    another order. The shorter way, by powers of L, is not: its terms can outgrow the result by orders of magnitude.
    """
    size = lower.shape[-1]
    inverses = lower.new_ones(*lower.shape[:-1], 1, 1)  # of the blocks on the diagonal, [..., C/block, block, block]
    block = 1
    while block < size:
        first, second = _pairs(inverses)
        coupling = _diagonal_blocks(lower, 2 * block)[..., block:, :block]
        inverses = lower.new_zeros(*first.shape[:-2], 2 * block, 2 * block)
        inverses[..., :block, :block] = first
        inverses[..., block:, block:] = second
        inverses[..., block:, :block] = -second @ coupling @ first
        block *= 2
    return inverses.squeeze(-3)


def _into_chunks(x: Tensor, seq_lens: Sequence[int], chunks: Sequence[int], size: int) -> Tensor:
    """[T, h, d] -> [N, h, C, d]; each sequence is filled up with zeros, which write nothing and decay nothing."""
    fills = [c * size - n for n, c in zip(seq_lens, chunks, strict=True)]
    if any(fills):
        parts = zip(x.split(list(seq_lens)), fills, strict=True)
        x = torch.cat([piece for part, fill in parts for piece in (part, x.new_zeros(fill, *x.shape[1:]))])
    return x.unflatten(0, (-1, size)).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _out_of_chunks(x: Tensor, seq_lens: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """[N, h, C, d] -> [T, h, d], without the filling."""
    flat = x.transpose(1, 2).flatten(0, 1)
    parts = flat.split([c * x.shape[2] for c in chunks])
    return torch.cat([part[:n] for part, n in zip(parts, seq_lens, strict=True)])


def _token_ranges(lengths: Sequence[int]) -> list[range]:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [range(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def _uniform(seq_lens: Sequence[int]) -> bool:
    return len(seq_lens) > 0 and all(n == seq_lens[0] for n in seq_lens)


@npu_kernel("kda_gate")
def kda_gate_npu(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """`kda_gate` on an NPU, by the kernel that `choose_gate` chooses."""
    tokens, heads, width = f.shape
    case = Gate(tokens, heads, width, f.dtype, current_device())
    return choose_gate(case).run(f, A_log, dt_bias, lower_bound)


@npu_kernel("kda_chunk")
def kda_chunk_npu(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`kda_chunk` on an NPU, by the kernel that `choose_chunk` chooses."""
    case = Chunked(tuple(seq_lens), k.shape[1], k.shape[2], v.shape[2], v.dtype, current_device())
    return choose_chunk(case).run(q, k, v, g, beta, state, seq_lens)


def choose_gate(case: Gate) -> Choice:
    return choose("kda_gate", GATE, case)


def choose_chunk(case: Chunked) -> Choice:
    return choose("kda_chunk", CHUNKED, case)


#: In order of preference.
GATE: tuple[Candidate[Gate], ...] = (
    Candidate("sgl_kda_gate", refuse_gate, gate),
    Candidate("composed", takes_anything, reference("kda_gate")),
)
CHUNKED: tuple[Candidate[Chunked], ...] = (
    Candidate("sgl_chunk_kda_fwd", refuse_chunk, chunk),
    Candidate("composed", takes_anything, partial(kda_in_chunks, size=CHUNK)),
)
