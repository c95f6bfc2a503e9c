"""Kimi Delta Attention in chunks: the same function as `kda.kda_recurrent`, with most of its work in large products.

Letters as in `ops.kda`; C tokens of a chunk, N chunks of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from kimi_k3_npu.ops import sgl
from kimi_k3_npu.ops.constants import constant
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import no_kernel, nothing_to_run
from kimi_k3_npu.ops.op import COMPOSED, operator

#: Decay beyond this is taken as this. It weighs nothing beside what a token writes itself, and what it multiplies stays
#: clear of subnormal numbers, on which a CPU is many times slower.
LEAST = 1e-30
#: Tokens of a chunk, on a CPU and on an NPU. A longer one has fewer states to carry and more products within.
SIZE, CHUNK = 32, 64

#: Of sgl_kernel_npu's chunk_kda_fwd: key and value dimensions, heads, and sequences of a batch.
WIDTHS = range(16, 257, 16)
MOST_HEADS = 128
MOST_SEQUENCES = 1024


@operator(
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


@dataclass(frozen=True)
class Chunked:
    """One chunked delta rule on one device. `has_empty`: some sequence has no tokens. `dtype` is v's, the one that the
    model computes in."""

    tokens: int
    sequences: int
    has_empty: bool
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: Device


@kda_chunk.case(Chunked)
def _chunk_case(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple:
    return q.shape[0], len(seq_lens), 0 in seq_lens, *k.shape[1:], v.shape[2], v.dtype


def refuse_chunk(case: Chunked) -> str | None:
    """The limits of chunk_kda_fwd: its host code's checks, and that it rounds q, k and v to bfloat16."""
    if reason := nothing_to_run(case.device, case.tokens) or no_kernel(case.device, sgl.KDA_CHUNK):
        return reason
    if case.dtype != torch.bfloat16:
        return f"v is {case.dtype}, which would be rounded to bfloat16"
    for name, width in (("K", case.key_width), ("V", case.value_width)):
        if width not in WIDTHS:
            return f"{name} = {width}, must be a multiple of {WIDTHS.step} up to {WIDTHS[-1]}"
    if case.heads > MOST_HEADS:
        return f"{case.heads} heads, at most {MOST_HEADS}"
    if case.sequences > MOST_SEQUENCES:
        return f"{case.sequences} sequences, at most {MOST_SEQUENCES}"
    return "a sequence is empty" if case.has_empty else None


@kda_chunk.kernel("sgl_chunk_kda_fwd", refuse_chunk)
def chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """q is scaled already. States stay fp32 [S, h, K, V]; o is bfloat16 on the way out."""
    kernel = sgl.kernel(sgl.KDA_CHUNK)
    o, states, *_ = kernel(
        *(x.to(torch.bfloat16).contiguous().unsqueeze(0) for x in (q, k, v)),
        *(x.float().contiguous().unsqueeze(0) for x in (g, beta)),
        scale=1.0,
        initial_state=state.contiguous(),
        output_final_state=True,
        cu_seqlens=boundaries(tuple(seq_lens), q.device),
        chunk_size=CHUNK,
        layout="BSND",
        use_gate_in_kernel=False,
        safe_gate=False,
        state_v_first=False,
    )
    return o.squeeze(0).float(), states


@kda_chunk.kernel(COMPOSED)
def chunk_composed(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Longer chunks than on a CPU: fewer states to carry, and larger products within."""
    return kda_in_chunks(q, k, v, g, beta, state, seq_lens, CHUNK)


@constant
def boundaries(seq_lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Where sequences begin and end, int64 [S + 1]."""
    return torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int64, device=device)
