"""npu_fused_infer_attention_score_v2 in the two forms that MLA takes: absorbed over a paged latent cache, and expanded.

B sequences, T tokens in all, N query heads, S tokens of one sequence, D the size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.npu.emulation.core import Limits, emulates, undefined

_fia = Limits("npu_fused_infer_attention_score_v2", "head_dim", "dtype")

_HALVES = (torch.float16, torch.bfloat16)
_MASK_SIZE = 2048


@dataclass
class _Call:
    query: Tensor
    key: Tensor
    value: Tensor
    query_rope: Tensor | None
    key_rope: Tensor | None
    atten_mask: Tensor | None
    q_lens: list[int] | None
    kv_lens: list[int] | None
    block_table: Tensor | None
    heads: int
    kv_heads: int
    scale: float
    layout: str
    sparse_mode: int
    block_size: int


@emulates(_fia)
def npu_fused_infer_attention_score_v2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    query_rope: Tensor | None = None,
    key_rope: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    block_table: Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    softmax_scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    sparse_mode: int = 0,
    block_size: int = 0,
    inner_precise: int = 0,
    return_softmax_lse: bool = False,
    **others: object,
) -> tuple[Tensor, Tensor]:
    """(attention in query's layout and dtype, log-sum-exp fp32 [T, N, 1] or [B, N, S, 1] or empty)."""
    _fia.no(**others)
    _fia(pre_tokens == next_tokens == 2147483647, "pre_tokens and next_tokens have no use in these sparse modes")
    _fia(input_layout in ("BSND", "TND"), f"layout {input_layout} is not emulated, only BSND and TND")
    _fia(query.dim() == len(input_layout), f"query is {query.dim()}-D in layout {input_layout}")
    _fia((query_rope is None) == (key_rope is None), "query_rope and key_rope go together")
    tensors = {"query": query, "key": key, "value": value, "query_rope": query_rope, "key_rope": key_rope}
    for name, tensor in tensors.items():
        if tensor is not None:
            _fia(tensor.is_contiguous(), f"{name} must be contiguous, it has strides {tensor.stride()}")
            _fia(tensor.dtype == query.dtype, f"{name} is {tensor.dtype}, query is {query.dtype}")
            _fia(tensor.numel() > 0, f"{name} is empty")
    _fia(query.dtype in _HALVES, f"query is {query.dtype}, must be float16 or bfloat16", "dtype")
    _fia(query.shape[-2] == num_query_heads, f"{num_query_heads=}, query has {query.shape[-2]}")
    lens = [None if given is None else [int(n) for n in given] for given in (actual_seq_qlen, actual_seq_kvlen)]
    kv_heads = num_key_value_heads or num_query_heads
    rope = (query_rope, key_rope)
    sizes = (num_query_heads, kv_heads, softmax_scale, input_layout, sparse_mode, block_size)
    call = _Call(query, key, value, *rope, atten_mask, *lens, block_table, *sizes)
    out, lse = _expanded(call) if block_table is None else _absorbed(call)
    return out, lse if return_softmax_lse else torch.empty(0)


def _absorbed(call: _Call) -> tuple[Tensor, Tensor]:
    """512-wide queries and 64-wide rotary parts over one latent head in pages of 16 or 128 tokens.

    q_lens is cumulative in TND, kv_lens is not: the tokens of each sequence. The cache is [blocks, block, D], in TND
    also [blocks, 1, block, D].
    """
    _fia(call.query_rope is not None, "a paged cache takes the absorbed form only, with query_rope and key_rope")
    _fia(call.heads in (1, 2, 4, 8, 16, 32, 64, 128), f"{call.heads} query heads, must be a power of two up to 128")
    _fia(call.kv_heads == 1, f"{call.kv_heads} key heads, must be 1")
    sizes = (call.query.shape[-1], call.key.shape[-1], call.value.shape[-1])
    ropes = (call.query_rope.shape[-1], call.key_rope.shape[-1])
    _fia(sizes == (512, 512, 512) and ropes == (64, 64), f"sizes {sizes} + {ropes}, must be 512 + 64", "head_dim")
    _fia(
        call.query_rope.shape[:-1] == call.query.shape[:-1], "query_rope must be shaped as query but for the last size"
    )

    _fia(call.block_size in (16, 128), f"block_size={call.block_size}, must be 16 or 128")
    caches = [_pages(call, name) for name in ("key", "value", "key_rope")]
    queries, ends = _absorbed_queries(call)
    table, lens = call.block_table, call.kv_lens
    _fia(lens is not None and len(lens) == len(queries), f"actual_seq_kvlen must give {len(queries)} lengths")
    _fia(table.dtype == torch.int32 and table.dim() == 2, f"block_table is {table.dtype} {list(table.shape)}")
    _fia(table.shape[0] == len(queries), f"block_table has {table.shape[0]} rows for {len(queries)} sequences")
    capacity = table.shape[1] * call.block_size
    _fia(max(lens) <= capacity, f"block_table has room for {capacity} tokens of a sequence, not for {max(lens)}")
    causal = _check_mask(call, many=max(q.shape[0] for q in queries) > 1)

    out = undefined(tuple(call.query.shape), torch.float32).flatten(0, -3)
    lse = undefined((out.shape[0], call.heads, 1), torch.float32)
    for b, (q, end) in enumerate(zip(queries, ends, strict=True)):
        blocks = table[b, : -(-lens[b] // call.block_size)].long()
        _fia(bool(((blocks >= 0) & (blocks < call.key.shape[0])).all()), f"block ids {blocks.tolist()} of sequence {b}")
        key, value, rope = (cache[blocks].flatten(0, 1)[: lens[b]].unsqueeze(1) for cache in caches)
        rows = slice(end - q.shape[0], end)
        out[rows], lse[rows] = _attend(q, torch.cat((key, rope), -1), value, call.scale, causal)
    lse = lse.view(*call.query.shape[:-1], 1)
    if call.layout == "BSND":
        lse = lse.transpose(1, 2).contiguous()  # [B, N, S, 1] there, unlike the output
    return out.view(call.query.shape).to(call.query.dtype), lse


def _pages(call: _Call, name: str) -> Tensor:
    """One cache as [blocks, block, D]."""
    cache: Tensor = getattr(call, name)
    if cache.dim() == 4:
        _fia(call.layout == "TND", f"{name} must be [blocks, block, D] in layout BSND")
        _fia(cache.shape[1] == 1, f"{name} is {list(cache.shape)}, must be [blocks, 1, block, D]")
        cache = cache.squeeze(1)
    _fia(cache.dim() == 3, f"{name} is {cache.dim()}-D, must be 3-D or 4-D")
    _fia(cache.shape[1] == call.block_size, f"{name} has blocks of {cache.shape[1]}, block_size={call.block_size}")
    _fia(cache.numel() < 2**31, f"{name} has {cache.numel()} elements, must be below 2^31")
    return cache


def _absorbed_queries(call: _Call) -> tuple[list[Tensor], list[int]]:
    """Queries of each sequence with their rotary part, [S, N, D + 64], and where each ends among all tokens."""
    query = torch.cat((call.query, call.query_rope), -1)
    if call.layout == "BSND":
        _fia.no(actual_seq_qlen=call.q_lens)
        queries = list(query)
        ends = [(b + 1) * query.shape[1] for b in range(query.shape[0])]
    else:
        ends = _cumulative(call.q_lens, "actual_seq_qlen", query.shape[0])
        queries = [query[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    lengths = [q.shape[0] for q in queries]
    _fia(all(1 <= length <= 16 for length in lengths), f"{lengths} queries in the sequences, must be 1 to 16 each")
    return queries, ends


def _expanded(call: _Call) -> tuple[Tensor, Tensor]:
    """Keys and values of every head in TND, lengths cumulative: 128 with a rotary part of 64, or 192, or 128."""
    _fia(call.layout == "TND", f"layout {call.layout} without a paged cache is not emulated, only TND")
    _fia(call.query.dtype == torch.bfloat16, f"query is {call.query.dtype}, must be bfloat16", "dtype")
    query, key, value = call.query, call.key, call.value
    sizes = (query.shape[-1], key.shape[-1], value.shape[-1])
    if call.query_rope is not None and call.key_rope is not None:
        ropes = (call.query_rope.shape[-1], call.key_rope.shape[-1])
        fits = sizes == (128, 128, 128) and ropes == (64, 64)
        _fia(fits, f"sizes {sizes} with rotary parts {ropes}, must be 128 with 64", "head_dim")
        _fia(call.query_rope.shape[:-1] == query.shape[:-1], "query_rope must be shaped as query but for the last size")
        _fia(call.key_rope.shape[:-1] == key.shape[:-1], "key_rope must be shaped as key but for the last size")
        query, key = torch.cat((query, call.query_rope), -1), torch.cat((key, call.key_rope), -1)
    else:
        allowed = ((128, 128, 128), (192, 192, 128), (192, 192, 192))
        _fia(sizes in allowed, f"sizes {sizes} of query, key and value, must be one of {allowed}", "head_dim")
    kv_heads = key.shape[1]
    heads = (kv_heads, value.shape[1], call.kv_heads)
    _fia(len(set(heads)) == 1, f"key, value and num_key_value_heads have {heads} heads")
    ratio, rest = divmod(call.heads, kv_heads)
    _fia(rest == 0 and ratio <= 64, f"{call.heads} query heads over {kv_heads} key heads")
    _fia(query.shape[0] <= 2**20, f"{query.shape[0]} tokens, at most 1M")

    q_ends = _cumulative(call.q_lens, "actual_seq_qlen", query.shape[0])
    kv_ends = _cumulative(call.kv_lens, "actual_seq_kvlen", key.shape[0])
    _fia(len(q_ends) == len(kv_ends), f"{len(q_ends)} query and {len(kv_ends)} key lengths")
    causal = _check_mask(call, many=None)

    out = undefined((*query.shape[:2], value.shape[2]), torch.float32)
    lse = undefined((*query.shape[:2], 1), torch.float32)
    for (q0, q1), (k0, k1) in zip(_spans(q_ends), _spans(kv_ends), strict=True):
        k, v = (t[k0:k1].repeat_interleave(ratio, 1) for t in (key, value))
        out[q0:q1], lse[q0:q1] = _attend(query[q0:q1], k, v, call.scale, causal)
    return out.to(query.dtype), lse


def _cumulative(ends: list[int] | None, name: str, tokens: int) -> list[int]:
    _fia(ends is not None, f"{name} must be given")
    _fia(len(ends) <= 4096, f"{name} has {len(ends)} entries, at most 4096")
    _fia(ends == sorted(ends) and ends[0] >= 0, f"{name}={ends} must be cumulative")
    _fia(ends[-1] <= tokens, f"{name} ends at {ends[-1]}, there are {tokens} tokens")
    return ends


def _spans(ends: list[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _check_mask(call: _Call, many: bool | None) -> bool:
    """Whether the attention is causal. `many`: whether a sequence has more than one query; None if both modes go."""
    mask = call.atten_mask
    _fia(call.sparse_mode in (0, 3), f"sparse_mode={call.sparse_mode}, must be 0 or 3")
    causal = call.sparse_mode == 3
    if many is not None:
        _fia(causal == many, f"sparse_mode={call.sparse_mode} with {'several queries' if many else 'one query'}")
    _fia((mask is not None) == causal, f"sparse_mode={call.sparse_mode} {'needs' if causal else 'takes no'} atten_mask")
    if mask is not None:
        _fia(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask is {mask.dtype}")
        square = (_MASK_SIZE, _MASK_SIZE)
        shapes = (square, (1, *square), (1, 1, *square))
        _fia(mask.shape in shapes, f"atten_mask is {list(mask.shape)}, must be one of {shapes}")
        _fia(mask.is_contiguous(), "atten_mask must be contiguous")
        upper = torch.ones(square, dtype=torch.bool).triu(1)
        _fia(torch.equal(mask.view(square).bool(), upper), "atten_mask must be 1 above the diagonal and 0 elsewhere")
    return causal


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """q [S, N, D], k [L, N or 1, D], v [L, N or 1, V] -> fp32 [S, N, V], log-sum-exp [S, N, 1]; zeros over no keys."""
    queries, keys = q.shape[0], k.shape[0]
    _fia(not causal or queries <= keys or keys == 0, f"{queries} queries over {keys} keys in sparse_mode 3")
    if keys == 0:
        return q.new_zeros((*q.shape[:2], v.shape[2]), dtype=torch.float32), torch.full((*q.shape[:2], 1), torch.inf)
    scores = torch.einsum("snd,lnd->snl", q.float(), k.float().expand(-1, q.shape[1], -1)) * scale
    if causal:
        # The lower right corners coincide: the last query sees every key.
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    return (
        torch.einsum("snl,lnv->snv", scores.softmax(-1), v.float().expand(-1, q.shape[1], -1)),
        scores.logsumexp(-1, keepdim=True),
    )
