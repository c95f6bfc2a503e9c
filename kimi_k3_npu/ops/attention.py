"""Softmax attention of the MLA layers, in its two forms. Tokens are causal: the last query of a sequence sees every
key.

Letters: T query tokens and Tk keys of S sequences laid end to end, h heads, R latent width, r width of the shared key
part (64 wide in K3 and, despite its published name `rope`, never rotated), D query/key width, V value width.
The references are here; the fused forms of an NPU are in `ops.fused_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import current
from kimi_k3_npu.ops.fused_attention import Expanded, Latent, expanded, latent, refuse_expanded, refuse_latent
from kimi_k3_npu.ops.limits import takes_anything
from kimi_k3_npu.ops.registry import define, npu_kernel, reference
from kimi_k3_npu.ops.select import Candidate, Choice, choose

#: Query rows are taken in blocks: BLOCK rows, which meet no keys that are ahead of all of them, or fewer so that the
#: scores of one block stay below MAX_SCORES elements (fp32: 64 MiB).
BLOCK, MAX_SCORES = 128, 1 << 24


@define(
    "causal_attention(Tensor q, Tensor k, Tensor v, SymInt[] query_lens, SymInt[] kv_lens, float scale) -> Tensor",
)
def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], scale: float
) -> Tensor:
    """Expanded form: q [T, h, D], k [Tk, h, D], v [Tk, h, V] -> [T, h, V]; Tk = sum of kv_lens, T = sum of
    query_lens."""
    outputs = [v.new_empty(0, *v.shape[1:])]
    parts = zip(q.split(list(query_lens)), k.split(list(kv_lens)), v.split(list(kv_lens)), strict=True)
    for queries, keys, values in parts:
        if queries.shape[0]:
            outputs.append(_attend(queries, keys.permute(1, 2, 0), values.transpose(0, 1), scale))
    return torch.cat(outputs)


@define(
    "latent_attention(Tensor q_latent, Tensor q_rope, Tensor latent_pool, Tensor rope_pool, SymInt[] slots, "
    "SymInt[] query_lens, SymInt[] kv_lens, float scale) -> Tensor"
)
def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    slots: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """Absorbed form over the cache, in which every head reads the same latent row as key and as value.

    q_latent [T, h, R], q_rope [T, h, r], latent_pool [slots, capacity, R], rope_pool [slots, capacity, r]; sequence s
    has kv_lens[s] rows in slot slots[s], its own query_lens[s] new ones included. Returns [T, h, R].
    """
    if all(n == 1 for n in query_lens) and consecutive(slots):
        used, longest = slice(slots[0], slots[0] + len(slots)), max(kv_lens)
        lengths = None if min(kv_lens) == longest else torch.tensor(kv_lens, device=q_latent.device)
        return attend_one(q_latent, q_rope, latent_pool[used, :longest], rope_pool[used, :longest], lengths, scale)
    q = torch.cat([q_latent, q_rope], dim=-1)
    outputs = [q_latent.new_empty(0, *q_latent.shape[1:])]
    for queries, slot, length in zip(q.split(list(query_lens)), slots, kv_lens, strict=True):
        if queries.shape[0]:
            latent, rope = latent_pool[slot, :length], rope_pool[slot, :length]
            keys = torch.cat([latent, rope], dim=-1).t().unsqueeze(0)  # [1, R + r, length], shared by the heads
            outputs.append(_attend(queries, keys, latent.unsqueeze(0), scale))
    return torch.cat(outputs)


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One sequence: q [n, h, D], keys [h or 1, D, L], values [h or 1, L, V] -> [n, h, V]; softmax in fp32."""
    total, length, heads = q.shape[0], keys.shape[-1], q.shape[1]
    rows = max(1, min(total, BLOCK, MAX_SCORES // (heads * length)))
    ahead = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    outputs = []
    for start in reversed(range(0, total, rows)):  # the widest block first: what it frees has room for the others
        block = q[start : start + rows].transpose(0, 1)  # [h, b, D]
        visible = length - total + min(start + rows, total)
        scores = (block @ keys[..., :visible]).float() * scale
        size = block.shape[1]
        scores[..., visible - size :].masked_fill_(ahead[:size, :size], float("-inf"))
        outputs.append((scores.softmax(dim=-1).to(values.dtype) @ values[:, :visible]).transpose(0, 1))
    return torch.cat(outputs[::-1])


def attend_one(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope: Tensor, lengths: Tensor | None, scale: float
) -> Tensor:
    """The absorbed form for one query of each sequence: q_latent [S, h, R], q_rope [S, h, r], latent [S, L, R], rope
    [S, L, r] -> [S, h, R].

    lengths [S]: how many rows each sequence has, all of them if None. Rows past a length get the weight 0, but have to
    be finite all the same, since 0 times NaN is NaN; a cache clears its slots for that.
    """
    scores = (q_latent @ latent.transpose(1, 2) + q_rope @ rope.transpose(1, 2)).float() * scale  # [S, h, L]
    if lengths is not None:
        beyond = torch.arange(latent.shape[1], device=scores.device) >= lengths[:, None, None]
        scores = scores.masked_fill(beyond, float("-inf"))
    return scores.softmax(dim=-1).to(latent.dtype) @ latent


def consecutive(slots: Sequence[int]) -> bool:
    """Whether there are slots and each follows the one before, so that a slice of a pool holds them."""
    return len(slots) > 0 and list(slots) == list(range(slots[0], slots[0] + len(slots)))


@npu_kernel("latent_attention")
def latent_attention_npu(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    slots: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """`latent_attention` on an NPU, by the kernel that `choose_latent_attention` chooses."""
    case = Latent(
        heads=q_latent.shape[1],
        sizes=(q_latent.shape[2], q_rope.shape[2]),
        query_lens=tuple(query_lens),
        kv_lens=tuple(kv_lens),
        slots=latent_pool.shape[0],
        capacity=latent_pool.shape[1],
        dtype=q_latent.dtype,
        pool_dtype=latent_pool.dtype,
        contiguous=latent_pool.is_contiguous() and rope_pool.is_contiguous(),
        device=current(),
    )
    arguments = (q_latent, q_rope, latent_pool, rope_pool, slots, query_lens, kv_lens, scale)
    return choose_latent_attention(case).run(*arguments)


@npu_kernel("causal_attention")
def causal_attention_npu(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], scale: float
) -> Tensor:
    """`causal_attention` on an NPU, by the kernel that `choose_causal_attention` chooses."""
    sizes = (q.shape[2], v.shape[2])
    case = Expanded(q.shape[1], sizes, tuple(query_lens), tuple(kv_lens), q.dtype, current())
    return choose_causal_attention(case).run(q, k, v, query_lens, kv_lens, scale)


def choose_latent_attention(case: Latent) -> Choice:
    return choose("latent_attention", LATENT, case)


def choose_causal_attention(case: Expanded) -> Choice:
    return choose("causal_attention", CAUSAL, case)


#: In order of preference.
LATENT: tuple[Candidate[Latent], ...] = (
    Candidate("fia_v2_absorbed", refuse_latent, latent),
    Candidate("composed", takes_anything, reference("latent_attention")),
)
CAUSAL: tuple[Candidate[Expanded], ...] = (
    Candidate("fia_v2_expanded", refuse_expanded, expanded),
    Candidate("composed", takes_anything, reference("causal_attention")),
)
