"""What transformers' `generate` needs of this package: the cache of a generation, and which options it has no answer
for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

#: Tokens a sequence that a cache has room for at first. Few generations come near the limit they are given.
FIRST_ROOM = 4096

_TAKES_BACK = "it takes tokens back, and a KDA state cannot forget any"
_OWN_CACHE = "this model keeps its own cache, which grows as needed"
#: Options of `generate` that would end in an error of transformers', or have no effect, and why.
UNSUPPORTED = {
    **dict.fromkeys(
        ("assistant_model", "assistant_early_exit", "prompt_lookup_num_tokens", "is_assistant", "speculation_type"),
        _TAKES_BACK,
    ),
    "position_ids": "the text model has no positions; sequences of one row cannot be told apart by them",
    "use_mtp": "this model has no layers that predict further tokens",
    **dict.fromkeys(("cache_implementation", "cache_config", "max_cache_len"), _OWN_CACHE),
    "compile_config": "decoding is compiled by compile_decoding()",
    "continuous_batching_config": "batches are padded; serving engines take requests as they come",
    "output_attentions": "attention weights are never formed",
    "output_hidden_states": "what layers compute is not kept",
}


class GenerationCache:
    """`past_key_values` of a generation: one cache slot a batch row, made when the number of rows is known.

    It grows with its sequences, which are expected to stay within `max_length` columns.
    """

    is_compileable = False

    def __init__(self, model: KimiK3ForCausalLM, max_length: int) -> None:
        self._model, self._max_length = model, max_length
        self._cache: ModelCache | None = None
        self._columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the padded batch seen so far."""
        return self._columns

    def attend(self, lengths: list[int], columns: int) -> CachedAttention:
        """The attention for a pass of `lengths[i]` new tokens in row i, out of `columns` new padded columns."""
        needed = self._columns + columns
        if self._cache is None:
            self._cache = self._model.new_cache(len(lengths), self._room(needed))
            for _ in lengths:
                self._cache.join()
        elif len(lengths) != self._cache.num_slots:
            raise ValueError(f"past_key_values are of {self._cache.num_slots} rows, this batch has {len(lengths)}")
        elif needed > self._cache.capacity:
            self._cache.grow(self._room(needed))
        return CachedAttention(self._cache, range(len(lengths)), lengths)

    def commit(self, attention: CachedAttention, columns: int) -> None:
        """Count the `columns` of a pass that has ended."""
        attention.commit()
        self._columns += columns

    def lengths(self, rows: int) -> list[int]:
        """Real tokens of each row so far."""
        return [self._cache.length(slot) if self._cache else 0 for slot in range(rows)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on as what row beam_idx[i] was."""
        if self._cache is not None:
            self._cache.reorder(beam_idx.tolist())

    def _room(self, needed: int) -> int:
        """Tokens a sequence to make room for: twice what is needed, so that growing stays rare."""
        if needed > self._max_length:
            return 2 * needed
        return max(needed, min(self._max_length, max(FIRST_ROOM, 2 * needed)))


def check_options(options: Mapping[str, Any]) -> None:
    """Raises KimiK3Error for options that this model's generation has no answer for, naming each."""
    found = [name for name in UNSUPPORTED if options.get(name) is not None and options[name] is not False]
    if found:
        raise KimiK3Error("; ".join(f"{name} is not supported: {UNSUPPORTED[name]}" for name in found))


def check_arguments(unsupported: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of a forward pass that it does not know, naming each and why where that is
    known."""
    given = sorted(name for name, value in unsupported.items() if value is not None and value is not False)
    if given:
        reasons = (f"{name} ({UNSUPPORTED[name]})" if name in UNSUPPORTED else name for name in given)
        raise TypeError(f"forward does not take {', '.join(reasons)}")
