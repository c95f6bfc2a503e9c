"""Attention by npu_fused_infer_attention_score_v2: the two forms of `ops.attention`, their limits and their launches.

The limits are those of torch_npu's page on the operator for A2 and A3, with one reading: for keys and values of every
head it asks that a sequence have fewer queries than keys in the causal mode. SGLang's Ascend backend passes equal
numbers there in every fresh prefill, so equal is taken as allowed.

Letters as in `ops.attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.ops.constants import constant
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import HALVES, OFFSET_LIMIT, nothing_to_run, wrong_dtype

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


@dataclass(frozen=True)
class Latent:
    """One absorbed attention over slots of `capacity` rows on one device; `contiguous` is of both pools."""

    heads: int
    sizes: tuple[int, int]
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    slots: int
    capacity: int
    dtype: torch.dtype
    pool_dtype: torch.dtype
    contiguous: bool
    device: Device


@dataclass(frozen=True)
class Expanded:
    """One attention over the keys and values of every head on one device."""

    heads: int
    sizes: tuple[int, int]
    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    dtype: torch.dtype
    device: Device


class Piece(NamedTuple):
    """Some consecutive queries of one sequence, and the keys that the last of them sees."""

    slot: int
    queries: int
    keys: int


def refuse_latent(case: Latent) -> str | None:
    """The limits of the absorbed form. `latent` brings any number of heads, queries and sequences within them."""
    if reason := nothing_to_run(case.device, sum(case.query_lens)):
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
    if reason := nothing_to_run(case.device, sum(case.query_lens)):
        return reason
    if reason := wrong_dtype("q", case.dtype, EXPANDED_DTYPES):
        return reason
    if case.sizes not in EXPANDED_SIZES:
        return f"query and value sizes are {case.sizes}, must be one of {EXPANDED_SIZES}"
    if case.heads > MOST_HEADS:
        return f"{case.heads} heads, at most {MOST_HEADS}"
    tokens, sequences = max(sum(case.query_lens), sum(case.kv_lens)), len(case.query_lens)
    if tokens > MOST_TOKENS:
        return f"{tokens} tokens, at most {MOST_TOKENS}"
    return f"{sequences} sequences, at most {MOST_SEQUENCES}" if sequences > MOST_SEQUENCES else None


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
