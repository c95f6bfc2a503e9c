"""Kimi-K3 in transformers: importing this module registers `kimi_k3` with AutoConfig, AutoModelForCausalLM,
AutoModelForImageTextToText and AutoProcessor, and KimiK3Tokenizer with AutoTokenizer.

transformers is the engine for one process: `generate` with its sampling, streaming, stopping and beams is all its
own. Its batches are padded; the model's are ragged, so the padding is taken out on the way in and put back on the way
out. transformers' own `kimi_linear` stays registered as it is; `KimiK3ForGeneration.from_pretrained` reads such
folders too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from kimi_k3_npu import envs
from kimi_k3_npu.checkpoint.load import ExpertWeights, Progress, load_model
from kimi_k3_npu.config import KimiK3Config, read_config_file
from kimi_k3_npu.engines.processing import register_auto_classes
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.fixed import decode_step, reach_of
from kimi_k3_npu.model.vision import image_features, splice


class KimiK3PreTrainedConfig(PreTrainedConfig):
    """`config.json` of a kimi_k3 checkpoint as transformers carries it; what it means is read by `KimiK3Config`."""

    model_type = "kimi_k3"

    text_config: dict | None = None
    vision_config: dict | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    media_placeholder_token_id: int | None = None
    tie_word_embeddings: bool = False

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> KimiK3PreTrainedConfig:
        return self

    @property
    def vocab_size(self) -> int:
        return (self.text_config or {})["vocab_size"]

    @property
    def hidden_size(self) -> int:
        return (self.text_config or {})["hidden_size"]

    @property
    def num_hidden_layers(self) -> int:
        return (self.text_config or {})["num_hidden_layers"]


class GenerationCache:
    """`past_key_values` of a generation: one cache slot a batch row, made when the number of rows is known."""

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
            self._cache = self._model.new_cache(len(lengths), max(self._max_length, needed))
            for _ in lengths:
                self._cache.join()
        elif needed > self._cache.capacity:
            self._cache = self._cache.grown(2 * needed)
        self._columns = needed
        return CachedAttention(self._cache, range(len(lengths)), lengths)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on as what row beam_idx[i] was."""
        if self._cache is not None:
            self._cache.reorder(beam_idx.tolist())


class KimiK3ForGeneration(PreTrainedModel, GenerationMixin):
    """The model behind transformers' interface, for prompts padded on either side. Weights come from
    `from_pretrained`."""

    config_class = KimiK3PreTrainedConfig
    main_input_name = "input_ids"

    def __init__(self, config: PreTrainedConfig, model: KimiK3ForCausalLM) -> None:
        super().__init__(config)
        self.model = model
        self._decode_step: Callable[..., Tensor] | None = None

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        config: PreTrainedConfig | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        expert_weights: ExpertWeights = "auto",
        vision: bool | None = None,
        scan: bool = True,
        progress: Progress | None = None,
        **unsupported: Any,
    ) -> KimiK3ForGeneration:
        """Load a kimi_k3 or kimi_linear checkpoint folder with this package's loader; arguments as in `load_model`.

        Raises TypeError for arguments of transformers' loader that have no meaning here, beside load_model's errors.
        """
        passed = {
            name: value for name, value in unsupported.items() if name not in _IGNORED and value not in (None, False)
        }
        if passed:
            raise TypeError(f"KimiK3ForGeneration.from_pretrained does not take {', '.join(sorted(passed))}")
        if isinstance(dtype, str):
            dtype = None if dtype == "auto" else getattr(torch, dtype)
        path = Path(pretrained_model_name_or_path)
        model = load_model(
            path,
            device=device,
            dtype=dtype,
            expert_weights=expert_weights,
            vision=vision,
            scan=scan,
            progress=progress,
        )
        wrapper = cls(config or _config_of(path, model.config), model)
        if (path / "generation_config.json").is_file():
            wrapper.generation_config = GenerationConfig.from_pretrained(path)
        return wrapper.eval()

    def compile_decoding(self, **options: Any) -> None:
        """From now on take a step of one token in every row as one graph, which `torch.compile` makes with `options`.

        The first step of a batch size, and of each doubling of the longest sequence, waits for its graph: seconds for a
        small model, and longer with every layer. Raises KimiK3Error on other devices than a CPU, whose engines capture
        graphs themselves, and without a C++ compiler.
        """
        if self.device.type != "cpu":
            raise KimiK3Error(f"decoding is compiled on a CPU only, and this model is on {self.device}")
        compiler = envs.cxx_compiler()
        if "backend" not in options and shutil.which(compiler) is None:
            raise KimiK3Error(f"compiling needs a C++ compiler, and {compiler} was not found; install it, or set CXX")
        self._decode_step = torch.compile(decode_step, **options)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("this class reads checkpoints in the published naming and does not write any")

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = GenerationCache(self.model, max_cache_length)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: GenerationCache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        grid_thws: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids [B, L] (or inputs_embeds [B, L, H]) -> logits fp32 [B, L, vocab], or of the last `logits_to_keep`
        columns.

        attention_mask [B, past + L] marks real tokens; logits of padding are 0. pixel_values [P, 3, p, p] and grid_thws
        [images, 3] are the images of all rows in order; each feature takes the place of one placeholder token.
        """
        rows = inputs_embeds if input_ids is None else input_ids
        if rows is None:
            raise ValueError("forward needs input_ids [B, L] or inputs_embeds [B, L, H]")
        batch, columns = rows.shape[:2]
        if attention_mask is None:
            real = torch.ones(batch, columns, dtype=torch.bool, device=rows.device)
        else:
            real = attention_mask[:, -columns:].bool()
        cache = past_key_values if past_key_values is not None else GenerationCache(self.model, columns)
        attention = cache.attend(real.sum(dim=1).tolist(), columns)
        flat = rows[real]  # [T] or [T, H]
        embeddings = flat if input_ids is None else None
        if pixel_values is not None:
            if input_ids is None or grid_thws is None:
                raise ValueError("pixel_values need input_ids with placeholder tokens, and grid_thws")
            embeddings = self._with_images(flat, pixel_values, grid_thws)
        if self._decode_step is not None and embeddings is None and attention.is_decoding_everyone:
            logits = self._decode_compiled(attention, flat)
        else:
            hidden = self.model(flat, attention, embeddings)
            logits = self.model.logits(hidden[_rows_kept(real, logits_to_keep)])
        attention.commit()

        kept = real[:, -logits_to_keep:]  # all columns for 0
        padded = logits.new_zeros(batch, kept.shape[1], logits.shape[-1])
        padded[kept] = logits
        return CausalLMOutputWithPast(logits=padded, past_key_values=cache if use_cache is not False else None)  # type: ignore[arg-type]

    def _decode_compiled(self, attention: CachedAttention, tokens: Tensor) -> Tensor:
        """tokens [B], one for each slot of the cache -> logits fp32 [B, vocab]."""
        assert self._decode_step is not None
        cache, longest = attention.cache, max(attention.kv_lens)
        lengths = torch.tensor(attention.kv_lens, device=tokens.device) - 1
        return self._decode_step(self.model, cache, tokens, lengths, reach_of(longest, cache.capacity))

    def _with_images(self, token_ids: Tensor, pixels: Tensor, grids: Tensor) -> Tensor:
        """Embeddings [T, H] of token_ids [T], the images' features in the places of placeholder tokens."""
        tower, projector = self.model.vision_tower, self.model.mm_projector
        placeholder = self.model.config.media_placeholder_token_id
        if tower is None or projector is None or placeholder is None:
            raise ValueError("this model was loaded without vision weights, or has none; it takes no pixel_values")
        frames = [(t, rows, columns) for t, rows, columns in grids.tolist()]
        features = image_features(tower, projector, pixels.to(token_ids.device), frames)
        return splice(self.model.embed(token_ids, [len(token_ids)]), token_ids, placeholder, features)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Any = None, **model_kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Beams and several answers to a prompt: its images go with each of its copies."""
        pixels, grids = model_kwargs.pop("pixel_values", None), model_kwargs.pop("grid_thws", None)
        images = {"pixel_values": pixels, "grid_thws": grids}
        if pixels is not None and expand_size > 1:
            images = self._repeat_images(expand_size, input_ids, pixels, grids)
        expand = super()._expand_inputs_for_generation  # type: ignore[misc]
        ids, kwargs = expand(expand_size, is_encoder_decoder, input_ids, **model_kwargs)
        return ids, kwargs | {name: value for name, value in images.items() if value is not None}

    def _repeat_images(self, copies: int, input_ids: Tensor, pixels: Tensor, grids: Tensor) -> dict[str, Any]:
        vision = self.model.config.vision
        assert vision is not None
        area = vision.merge_kernel_size[0] * vision.merge_kernel_size[1]
        parts = list(zip(pixels.split(grids.prod(dim=1).tolist()), grids, strict=True))
        repeated = []
        for wanted in (input_ids == self.model.config.media_placeholder_token_id).sum(dim=1).tolist():
            row = []
            while wanted > 0 and parts:
                row.append(parts.pop(0))
                wanted -= int(row[-1][1][1:].prod()) // area
            repeated += row * copies
        return {
            "pixel_values": torch.cat([part for part, _ in repeated]),
            "grid_thws": torch.stack([grid for _, grid in repeated]),
        }


#: Arguments that AutoModelForCausalLM passes along by itself.
_IGNORED = {"trust_remote_code", "local_files_only", "attn_implementation", "use_safetensors", "adapter_kwargs"}


def _rows_kept(real: Tensor, columns: int) -> Tensor:
    """Which of the flat tokens lie in the last `columns` columns: bool [T]."""
    late = torch.zeros_like(real)
    late[:, -columns:] = True
    return late[real]


def _config_of(path: Path, config: KimiK3Config) -> KimiK3PreTrainedConfig:
    raw = read_config_file(path)
    if config.model_type == "kimi_k3":
        return KimiK3PreTrainedConfig.from_dict(raw)
    return KimiK3PreTrainedConfig(
        text_config=raw,
        dtype=config.dtype,
        bos_token_id=raw.get("bos_token_id"),
        eos_token_id=raw.get("eos_token_id"),
        pad_token_id=raw.get("pad_token_id"),
    )


AutoConfig.register("kimi_k3", KimiK3PreTrainedConfig, exist_ok=True)
AutoModelForCausalLM.register(KimiK3PreTrainedConfig, KimiK3ForGeneration, exist_ok=True)
AutoModelForImageTextToText.register(KimiK3PreTrainedConfig, KimiK3ForGeneration, exist_ok=True)
register_auto_classes(KimiK3PreTrainedConfig)
