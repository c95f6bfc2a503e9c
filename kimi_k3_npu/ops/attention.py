"""Softmax attention of the MLA layers, in its two forms. Tokens are causal: the last query of a sequence sees every
key.

Letters: T query tokens and Tk keys of S sequences laid end to end, h heads, R latent width, r width of the shared key
part (64 wide in K3 and, despite its published name `rope`, never rotated), D query/key width, V value width.

On an NPU both are npu_fused_infer_attention_score_v2. The limits are those of torch_npu's page on it for A2 and A3,
with one reading: for keys and values of every head it asks that a sequence have fewer queries than keys in the causal
mode. SGLang's Ascend backend passes equal numbers there in every fresh prefill, so equal is taken as allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops import schemas
from kimi_k3_npu.ops.constants import constant
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import HALVES, OFFSET_LIMIT, nothing_to_run, wrong_dtype
from kimi_k3_npu.ops.op import operator

#: Query rows are taken in blocks: BLOCK rows, which meet no keys that are ahead of all of them, or fewer so that the
#: scores of one block stay below MAX_SCORES elements (fp32: 64 MiB).
BLOCK, MAX_SCORES = 128, 1 << 24

#: Rows of a page of the latent cache: 16 and 128 are allowed, and 128 reads faster.
PAGE = 128
#: (R, r) of the absorbed form, and (D, V) of the expanded one.
LATENT_SIZES = ((512, 64),)
EXPANDED_SIZES = ((128, 128), (192, 128), (192, 192))
EXPANDED_DTYPES = (torch.bfloat16,)
#: Heads: a power of two up to this in the absorbed form, any number up to the other in the expanded one.
MOST_LATENT_HEADS = 128
MOST_HEADS = 256
#: Queries of one sequence in the absorbed form, sequences of a batch, and tokens of a batch.
MOST_QUERIES = 16
MOST_SEQUENCES = 4096
MOST_TOKENS = 1 << 20

#: The operator's numbers for attention without a mask, and with the compressed mask aligned to the lower right corner.
_UNMASKED, _CAUSAL = 0, 3
_MASK_SIZE = 2048


@operator(
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


@operator(
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


@dataclass(frozen=True)
class Latent:
    """One absorbed attention of `tokens` queries over slots of `capacity` rows, on one device; `contiguous` is of both
    pools."""

    tokens: int
    heads: int
    sizes: tuple[int, int]
    slots: int
    capacity: int
    dtype: torch.dtype
    pool_dtype: torch.dtype
    contiguous: bool
    device: Device


@dataclass(frozen=True)
class Expanded:
    """One attention of so many queries and keys in all over the keys and values of every head, on one device."""

    queries: int
    keys: int
    sequences: int
    heads: int
    sizes: tuple[int, int]
    dtype: torch.dtype
    device: Device


class Piece(NamedTuple):
    """Some consecutive queries of one sequence, and the keys that the last of them sees."""

    slot: int
    queries: int
    keys: int


@latent_attention.case(Latent)
def _latent_case(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    slots: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
) -> tuple:
    tokens, heads, width = q_latent.shape
    slots_of_pool, capacity, _ = latent_pool.shape
    contiguous = latent_pool.is_contiguous() and rope_pool.is_contiguous()
    dtypes = q_latent.dtype, latent_pool.dtype
    return tokens, heads, (width, q_rope.shape[2]), slots_of_pool, capacity, *dtypes, contiguous


@causal_attention.case(Expanded)
def _expanded_case(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], scale: float
) -> tuple:
    return q.shape[0], k.shape[0], len(query_lens), q.shape[1], (q.shape[2], v.shape[2]), q.dtype


def refuse_latent(case: Latent) -> str | None:
    """The limits of the absorbed form. `latent` brings any number of heads, queries and sequences within them."""
    if reason := nothing_to_run(case.device, case.tokens):
        return reason
    if reason := wrong_dtype("q", case.dtype, HALVES):
        return reason
    if case.pool_dtype != case.dtype:
        return f"the cache is {case.pool_dtype}, must be q's {case.dtype}"
    if case.sizes not in LATENT_SIZES:
        return f"latent + shared width are {case.sizes}, must be {LATENT_SIZES[0]}"
    if case.heads > MOST_LATENT_HEADS:
        return f"{case.heads} heads, at most {MOST_LATENT_HEADS}"
    if case.capacity % PAGE:
        return f"a slot has {case.capacity} rows, must be a multiple of {PAGE}"
    if case.slots * case.capacity * max(case.sizes) >= OFFSET_LIMIT:
        return f"the pool has {case.slots * case.capacity * max(case.sizes)} elements, must be below 2^31"
    return None if case.contiguous else "the pools must be contiguous"


def refuse_expanded(case: Expanded) -> str | None:
    """The limits of the form with keys and values of every head."""
    if reason := nothing_to_run(case.device, case.queries):
        return reason
    if reason := wrong_dtype("q", case.dtype, EXPANDED_DTYPES):
        return reason
    if case.sizes not in EXPANDED_SIZES:
        return f"query and value sizes are {case.sizes}, must be one of {EXPANDED_SIZES}"
    if case.heads > MOST_HEADS:
        return f"{case.heads} heads, at most {MOST_HEADS}"
    if (tokens := max(case.queries, case.keys)) > MOST_TOKENS:
        return f"{tokens} tokens, at most {MOST_TOKENS}"
    return f"{case.sequences} sequences, at most {MOST_SEQUENCES}" if case.sequences > MOST_SEQUENCES else None


@latent_attention.kernel("fia_v2_absorbed", refuse_latent, schemas.PAGED_ATTENTION)
def latent(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_pool: Tensor,
    rope_pool: Tensor,
    slots: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
) -> Tensor:
    """`latent_attention` over the pools read as a paged cache, whose block table is consecutive within a slot.

    A sequence with more queries than the operator takes is passed as several that share their pages, and more sequences
    than it takes are several calls.
    """
    pieces = pieces_of(slots, query_lens, kv_lens)
    batches = [pieces[i : i + MOST_SEQUENCES] for i in range(0, len(pieces), MOST_SEQUENCES)]
    if len(batches) == 1:
        return _latent(q_latent, q_rope, latent_pool, rope_pool, pieces, scale)
    tokens = [sum(piece.queries for piece in batch) for batch in batches]
    parts = zip(q_latent.split(tokens), q_rope.split(tokens), batches, strict=True)
    return torch.cat([_latent(q, rope, latent_pool, rope_pool, batch, scale) for q, rope, batch in parts])


def _latent(
    q_latent: Tensor, q_rope: Tensor, latent_pool: Tensor, rope_pool: Tensor, pieces: Sequence[Piece], scale: float
) -> Tensor:
    """One call. Heads are filled up with zero queries to a power of two; the result is a view without them."""
    heads, padded = q_latent.shape[1], padded_heads(q_latent.shape[1])
    keys = [piece.keys for piece in pieces]
    causal = any(piece.queries > 1 for piece in pieces)
    table = block_table(
        tuple(piece.slot for piece in pieces), latent_pool.shape[1] // PAGE, -(-max(keys) // PAGE), q_latent.device
    )
    out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        _pad_heads(q_latent, padded),
        _pages(latent_pool),
        _pages(latent_pool),
        query_rope=_pad_heads(q_rope, padded),
        key_rope=_pages(rope_pool),
        atten_mask=causal_mask(q_latent.device) if causal else None,
        actual_seq_qlen=list(accumulate(piece.queries for piece in pieces)),
        actual_seq_kvlen=keys,  # with pages not a running sum
        block_table=table,
        num_query_heads=padded,
        num_key_value_heads=1,
        softmax_scale=scale,
        input_layout="TND",
        sparse_mode=_CAUSAL if causal else _UNMASKED,
        block_size=PAGE,
    )
    return out.narrow(1, 0, heads)


@causal_attention.kernel("fia_v2_expanded", refuse_expanded, schemas.ATTENTION)
def expanded(
    q: Tensor, k: Tensor, v: Tensor, query_lens: Sequence[int], kv_lens: Sequence[int], scale: float
) -> Tensor:
    """`causal_attention`, with or without a cached prefix: queries are aligned to the end of their keys."""
    out, _ = torch.ops.npu.npu_fused_infer_attention_score_v2(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        atten_mask=causal_mask(q.device),
        actual_seq_qlen=list(accumulate(query_lens)),
        actual_seq_kvlen=list(accumulate(kv_lens)),
        num_query_heads=q.shape[1],
        num_key_value_heads=k.shape[1],
        softmax_scale=scale,
        input_layout="TND",
        sparse_mode=_CAUSAL,
    )
    return out


def padded_heads(heads: int) -> int:
    """The number of query heads that the absorbed form is given: the next power of two."""
    return 1 << (heads - 1).bit_length()


def pieces_of(slots: Sequence[int], query_lens: Sequence[int], kv_lens: Sequence[int]) -> list[Piece]:
    """Each sequence's queries in runs of at most MOST_QUERIES; sequences without queries have none."""
    pieces = []
    for slot, queries, keys in zip(slots, query_lens, kv_lens, strict=True):
        for start in range(0, queries, MOST_QUERIES):
            end = min(start + MOST_QUERIES, queries)
            pieces.append(Piece(slot, end - start, keys - queries + end))
    return pieces


@constant
def causal_mask(device: torch.device) -> Tensor:
    """The compressed mask of the causal mode, bool [2048, 2048]: True is not seen. It serves any lengths."""
    return torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu(1)


@constant
def block_table(slots: tuple[int, ...], pages_of_slot: int, width: int, device: torch.device) -> Tensor:
    """The pages of each slot, int32 [len(slots), width]."""
    first = torch.tensor(slots, device=device).unsqueeze(1) * pages_of_slot
    return (first + torch.arange(width, device=device)).to(torch.int32)


def _pages(pool: Tensor) -> Tensor:
    """[slots, capacity, d] -> [pages, 1, PAGE, d], a view."""
    return pool.view(-1, 1, PAGE, pool.shape[-1])


def _pad_heads(q: Tensor, heads: int) -> Tensor:
    """[T, h, d] -> contiguous [T, heads, d], zero where no head was."""
    return F.pad(q, (0, 0, 0, heads - q.shape[1])).contiguous()
