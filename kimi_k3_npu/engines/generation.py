"""What transformers' `generate` needs of this package: the cache of a generation, a folder's settings for it, and which
options it has no answer for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.config.values import check_token_ids, read_json_object, wrong
from kimi_k3_npu.errors import ConfigError, KimiK3Error
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

CONFIG_FILE = "generation_config.json"
#: Values of generation_config.json by what they have to be, in words: their type and least value.
_NUMBERS: dict[str, tuple[str, Any, float, tuple[str, ...]]] = {
    "counts": (
        "an integer of at least 1",
        int,
        1,
        ("max_length", "max_new_tokens", "num_beams", "num_return_sequences", "prefill_chunk_size"),
    ),
    "limits": ("an integer of at least 0", int, 0, ("min_length", "min_new_tokens", "no_repeat_ngram_size", "top_k")),
    "numbers": (
        "a number of at least 0",
        (int, float),
        0,
        ("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    ),
}
#: Far above any of them, and below what no tensor can hold.
MAX_NUMBER = 2**31 - 1
_SWITCHES = ("do_sample", "use_cache", "remove_invalid_values", "renormalize_logits")


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


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raises KimiK3Error for options that this model's generation has no answer for, naming each; `where` they are goes
    before."""
    found = [name for name in UNSUPPORTED if options.get(name) is not None and options[name] is not False]
    if found:
        raise KimiK3Error(where + "; ".join(f"{name} is not supported: {UNSUPPORTED[name]}" for name in found))


def check_arguments(unsupported: Mapping[str, Any]) -> None:
    """Raises TypeError for arguments of a forward pass that it does not know, naming each and why where that is
    known."""
    given = sorted(name for name, value in unsupported.items() if value is not None and value is not False)
    if given:
        reasons = (f"{name} ({UNSUPPORTED[name]})" if name in UNSUPPORTED else name for name in given)
        raise TypeError(f"forward does not take {', '.join(reasons)}")


def read_generation_config(folder: Path, vocab_size: int) -> GenerationConfig | None:
    """`folder/generation_config.json`, None when there is none. Raises ConfigError for a value that generation would
    fail on, and KimiK3Error for options that it has no answer for."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    raw = read_json_object(folder / CONFIG_FILE)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        check_token_ids(name, raw.get(name), vocab_size, file=CONFIG_FILE, several=name == "eos_token_id")
    for words, types, least, names in _NUMBERS.values():
        for name in names:
            value = raw.get(name)
            number = isinstance(value, types) and not isinstance(value, bool)
            if value is not None and not (number and least <= value <= MAX_NUMBER):
                raise wrong(name, value, f"expected {words}, or null", CONFIG_FILE)
    for name in _SWITCHES:
        if raw.get(name) not in (None, True, False):
            raise wrong(name, raw[name], "expected true or false", CONFIG_FILE)
    check_options(raw, f"{CONFIG_FILE}: ")
    try:
        return GenerationConfig.from_dict(raw)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE}: {error}") from None


def check_folder(folder: Path) -> None:
    """Raises KimiK3Error for what a folder's generation_config.json asks for and commands, which give one answer to a
    prompt token by token, would leave out; beside the errors of `read_generation_config`."""
    config = read_generation_config(folder, KimiK3Config.from_pretrained(folder).text.vocab_size)
    if config is None:
        return
    for name in ("num_beams", "num_return_sequences"):
        if (getattr(config, name) or 1) > 1:
            raise wrong(name, getattr(config, name), "which this command does not do; expected 1 or null", CONFIG_FILE)
    if config.stop_strings:
        wanted = "which this command does not look for; end tokens go in eos_token_id, so leave it out"
        raise wrong("stop_strings", config.stop_strings, wanted, CONFIG_FILE)
