"""Kimi-K3 in transformers: importing this module registers `kimi_k3` with AutoConfig, AutoModelForCausalLM,
AutoModelForImageTextToText and AutoProcessor, and KimiK3Tokenizer with AutoTokenizer.

transformers is the engine for one process: `generate` with its sampling, streaming, stopping and beams is all its
own. Its batches are padded; the model's are ragged, so the padding is taken out on the way in and put back on the way
out. transformers' own `kimi_linear` stays registered as it is; `KimiK3ForGeneration.from_pretrained` reads such
folders too.
"""

from __future__ import annotations

import shutil
import warnings
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
from kimi_k3_npu.checkpoint.load import DTYPES, Progress, load_model
from kimi_k3_npu.config import KimiK3Config, read_config_file
from kimi_k3_npu.engines.generation import GenerationCache, check_arguments, check_options, read_generation_config
from kimi_k3_npu.engines.padding import check_prompts, kept_tokens, next_token_loss, real_tokens
from kimi_k3_npu.engines.processing import register_auto_classes
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.model.attention import CachedAttention
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
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        expert_weights: str = "auto",
        vision: bool | None = None,
        scan: bool = True,
        progress: Progress | None = None,
        **unsupported: Any,
    ) -> KimiK3ForGeneration:
        """Load a kimi_k3 or kimi_linear checkpoint folder with this package's loader; arguments as in `load_model`.

        `dtype` may be a name too, or "auto" for the checkpoint's own; `torch_dtype` is its earlier name.
        Raises TypeError for arguments of transformers' loader that have no meaning here, beside load_model's errors.
        """
        passed = {
            name: value for name, value in unsupported.items() if name not in _IGNORED and value not in (None, False)
        }
        if passed:
            raise TypeError(f"KimiK3ForGeneration.from_pretrained does not take {', '.join(sorted(passed))}")
        wanted = _dtype(dtype, torch_dtype)
        path = Path(pretrained_model_name_or_path)
        settings = read_generation_config(path, KimiK3Config.from_pretrained(path).text.vocab_size)
        model = load_model(
            path,
            device=device,
            dtype=wanted,
            expert_weights=expert_weights,
            vision=vision,
            scan=scan,
            progress=progress,
        )
        wrapper = cls(config or _config_of(path, model.config), model)
        if settings is not None:
            wrapper.generation_config = settings
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

    def generate(  # type: ignore[override]
        self, inputs: Tensor | None = None, generation_config: GenerationConfig | None = None, **kwargs: Any
    ) -> Any:
        """transformers' generation, for prompts padded on either side. Raises KimiK3Error, beside transformers' own
        errors, for options that this model has no answer for."""
        asked = vars(generation_config or self.generation_config)
        check_options(asked | {name: value for name, value in kwargs.items() if value is not None})
        return super().generate(inputs, generation_config, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            check_prompts(mask, generation_config.prefill_chunk_size)
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
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unsupported: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """input_ids [B, L] (or inputs_embeds [B, L, H]) -> logits fp32 [B, L, vocab].

        Args:
            attention_mask: [B, past + L], 1 for real tokens; columns with 0 are as if they were not there, and their
                logits are 0.
            past_key_values: What the pass before returned, which had the columns before these.
            pixel_values: [P, 3, p, p], with grid_thws [images, 3] the images of all rows in order; each feature takes
                the place of one placeholder token.
            labels: [B, L], the tokens themselves or -100; the loss is each real token's prediction of the next real
                one, over num_items_in_batch if that is given.
            logits_to_keep: Logits of each row's last tokens only, [B, logits_to_keep, vocab], zeros before where a row
                has fewer; 0 for all columns.
            return_dict: False for a tuple of what there is.

        Raises:
            TypeError: An argument is none of these and not None or False.
            ValueError: Arguments do not fit each other.
        """
        check_arguments(unsupported)
        rows = inputs_embeds if input_ids is None else input_ids
        if rows is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("forward needs one of input_ids [B, L] and inputs_embeds [B, L, H]")
        batch, columns = rows.shape[:2]
        _check_outputs(logits_to_keep, labels, (batch, columns))
        cache = GenerationCache(self.model, columns) if past_key_values is None else past_key_values
        if not isinstance(cache, GenerationCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}, expected what a pass of this model returned"
            )
        real, lengths = real_tokens(attention_mask, rows, cache.get_seq_length(), cache.lengths(batch))
        attention = cache.attend(lengths, columns)
        kept, places = kept_tokens(real, logits_to_keep)
        logits = self._logits(attention, rows[real], kept[real], pixel_values, grid_thws)
        cache.commit(attention, columns)

        padded = logits.new_zeros(batch, logits_to_keep or columns, logits.shape[-1])
        padded[kept.nonzero()[:, 0], places[kept]] = logits
        output = CausalLMOutputWithPast(
            loss=None if labels is None else next_token_loss(logits, labels, real, num_items_in_batch),  # type: ignore[arg-type]
            logits=padded,  # type: ignore[arg-type]
            past_key_values=cache if use_cache is not False else None,  # type: ignore[arg-type]
        )
        return output.to_tuple() if return_dict is False else output

    def _logits(
        self,
        attention: CachedAttention,
        flat: Tensor,
        kept: Tensor,
        pixel_values: Tensor | None,
        grid_thws: Tensor | None,
    ) -> Tensor:
        """flat token ids [T] or embeddings [T, H], of which bool [T] are kept -> logits fp32 [kept, vocab]."""
        embeddings = flat if flat.ndim == 2 else None
        if pixel_values is not None:
            if embeddings is not None or grid_thws is None:
                raise ValueError("pixel_values need input_ids with placeholder tokens, and grid_thws")
            embeddings = self._with_images(flat, pixel_values, grid_thws)
        if self._decode_step is not None and embeddings is None and attention.is_decoding_everyone:
            return self._decode_compiled(attention, flat)
        return self.model.logits(self.model(flat, attention, embeddings)[kept])

    def _decode_compiled(self, attention: CachedAttention, tokens: Tensor) -> Tensor:
        """tokens [B], one for each slot of the cache -> logits fp32 [B, vocab]."""
        assert self._decode_step is not None
        attention.begin()
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

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict:
        """Images go with the pass that holds their placeholders: the first, or each one where no cache is kept.

        Newer versions of transformers see to it themselves; 5.12 hands them to every pass.
        """
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if not kwargs.get("is_first_iteration") and kwargs.get("use_cache", True):
            inputs.pop("pixel_values", None)
        return inputs

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


def _dtype(dtype: Any, torch_dtype: Any) -> torch.dtype | None:
    """What transformers understands as a dtype, None for the checkpoint's own; `load_model` checks it further."""
    if torch_dtype is not None:
        warnings.warn("torch_dtype is the earlier name of dtype; use dtype", FutureWarning, stacklevel=3)
        if dtype not in (None, torch_dtype):
            raise KimiK3Error(f"dtype is {dtype!r}, but torch_dtype is {torch_dtype!r}; give one of them")
        dtype = torch_dtype
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise KimiK3Error(f"dtype is {dtype!r}; supported: auto, {', '.join(DTYPES)}")
        return DTYPES[dtype.removeprefix("torch.")]
    return dtype


def _check_outputs(logits_to_keep: Any, labels: Tensor | None, shape: tuple[int, int]) -> None:
    if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise ValueError(f"logits_to_keep is {logits_to_keep!r}, expected how many of the last logits, or 0 for all")
    if labels is not None and logits_to_keep:
        raise ValueError(f"labels need the logits of all columns: logits_to_keep is {logits_to_keep}, expected 0")
    if labels is not None and tuple(labels.shape) != shape:
        raise ValueError(f"labels are {list(labels.shape)}, expected [B, L] = {list(shape)}")


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
