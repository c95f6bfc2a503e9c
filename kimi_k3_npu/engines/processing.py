"""K3's tokenizer and processor in the form that transformers, and engines built on it, expect.

They read checkpoint folders themselves and run no code from them. `apply_chat_template` writes K3's chat format, which
has no Jinja template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers import AddedToken, AutoProcessor, BatchFeature, PreTrainedTokenizer, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES
from transformers.tokenization_utils_base import BatchEncoding

from kimi_k3_npu.chat.prompt import MEDIA_PAD, Prompt, chat_prompt, images_of, text_prompt
from kimi_k3_npu.chat.render import encode, image_prompt, render
from kimi_k3_npu.images import ImageBatch, ImageSettings, read_media_config
from kimi_k3_npu.tokenizer import Tokenizer, byte_alphabet, load_tokenizer, read_settings

#: One conversation in OpenAI's form, or a list of them.
Conversations = Sequence[Any]

_ROLES = {"bos_token": "[BOS]", "eos_token": "<|end_of_msg|>", "pad_token": "[PAD]", "unk_token": "[UNK]"}
_SETTINGS = (*_ROLES, "model_max_length", "padding_side")
#: What engines send with every chat, whatever the model: vLLM names the form of Cohere's template.
_CONSTANTS = ("cohere_format",)


class KimiK3Tokenizer(PreTrainedTokenizer):
    """A `Tokenizer` as transformers has them.

    As with the published class, control tokens in a text that is encoded are control tokens; `apply_chat_template`
    keeps them out of what users write.
    """

    vocab_files_names: ClassVar = {}  # type: ignore[misc]
    model_input_names: ClassVar = ["input_ids", "attention_mask"]  # type: ignore[misc]
    #: Generation goes on after the last column.
    padding_side = "left"

    def __init__(self, tokenizer: Tokenizer, **kwargs: Any) -> None:
        self.segments = tokenizer
        self._alphabet = byte_alphabet()
        self._ids: dict[str, int] | None = None
        self._added_tokens_decoder = {
            token: AddedToken(name, special=name in tokenizer.hidden, normalized=False)
            for name, token in tokenizer.controls.items()
        }
        roles = {role: name for role, name in _ROLES.items() if name in tokenizer.controls}
        super().__init__(**roles | kwargs)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str | Path, *_: Any, **kwargs: Any
    ) -> KimiK3Tokenizer:
        """Read the tokenizer of a checkpoint folder; `kwargs` override its tokenizer_config.json. Raises
        TokenizerError."""
        folder = Path(pretrained_model_name_or_path)
        found = {key: value for key, value in (read_settings(folder) | kwargs).items() if key in _SETTINGS and value}
        # Control tokens are written as they are, or as objects with their flags.
        plain = {key: value["content"] if isinstance(value, dict) else value for key, value in found.items()}
        return cls(load_tokenizer(folder), name_or_path=str(folder), **plain)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is derived when first asked for: being used changes nothing that fingerprints are made of."""
        return self.__dict__ | {"_ids": None}

    @property
    def vocab_size(self) -> int:
        return self.segments.size

    def __len__(self) -> int:
        return self.segments.size

    def get_vocab(self) -> dict[str, int]:
        if self._ids is None:
            ordinary = {self._written(text): token for token, text in self.segments.vocabulary.items()}
            self._ids = ordinary | self.segments.controls
        return self._ids

    def _written(self, text: bytes) -> str:
        return "".join(self._alphabet[byte] for byte in text)

    def _convert_token_to_id(self, token: str) -> int | None:
        return self.get_vocab().get(token, self.unk_token_id)

    def _convert_id_to_token(self, index: int) -> str:
        return self.segments.name(index) or self._written(self.segments.vocabulary.get(index, b""))

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [self._convert_id_to_token(token) for token in self.segments.encode_segment(text, special=False)]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._decode([self._convert_token_to_id_with_added_voc(token) for token in tokens])

    def _encode_plus(self, text: Any, text_pair: Any = None, **kwargs: Any) -> BatchEncoding:  # type: ignore[override]
        if isinstance(text, str) and text:
            text = self.segments.encode_segment(text, special=not kwargs.pop("split_special_tokens", False))
        return super()._encode_plus(text, text_pair, **kwargs)

    def _decode(  # type: ignore[override]
        self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, **_: Any
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.segments.decode(map(int, ids), skip_special=skip_special_tokens)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        raise NotImplementedError("this class reads checkpoint folders and does not write any")

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Conversations,
        tools: Sequence[Any] | None = None,
        *,
        tokenize: bool = True,
        padding: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool = True,
        image_prompts: Sequence[str] = (),
        **template: Any,
    ) -> Any:
        """A conversation, or a list of them, as token ids; as text without `tokenize`.

        Args:
            image_prompts: The text that stands for each image.
            template: As for `render_options`.

        The text must not be encoded again: what users wrote could then become control tokens.
        """
        several = _is_several(conversation)
        options = render_options(tools=tools, **template) | {"images": image_prompts}
        rendered = [render(messages, **options) for messages in (conversation if several else [conversation])]
        if not tokenize:
            texts = ["".join(segment.text for segment in segments) for segments in rendered]
            return texts if several else texts[0]
        ids = [encode(self.segments, segments) for segments in rendered]
        if return_tensors is None and not (several and padding):
            rows: Any = ids if several else ids[0]
            masks = [[1] * len(row) for row in ids]
            together = BatchEncoding({"input_ids": rows, "attention_mask": masks if several else masks[0]})
        else:
            together = self.pad({"input_ids": ids}, padding=padding, return_tensors=return_tensors)
        return together if return_dict else together["input_ids"]


class KimiK3ImageProcessor(BaseImageProcessor):
    """`ImageSettings` as transformers has them. `medias` is the published name for images."""

    model_input_names: ClassVar = ["pixel_values", "grid_thws"]  # type: ignore[misc]

    def __init__(self, media_proc_cfg: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.media_proc_cfg = dict(media_proc_cfg)
        self.settings = ImageSettings.from_config(media_proc_cfg)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **_: Any) -> KimiK3ImageProcessor:  # type: ignore[override]
        """Read preprocessor_config.json of a checkpoint folder. Raises ImageError."""
        ImageSettings.from_folder(pretrained_model_name_or_path)
        return cls(read_media_config(pretrained_model_name_or_path))

    def to_dict(self) -> dict[str, Any]:
        return {"media_proc_cfg": self.media_proc_cfg, "image_processor_type": type(self).__name__}

    def preprocess(
        self, images: Any = None, *, medias: Any = None, return_tensors: str | None = "pt", **_: Any
    ) -> BatchFeature:
        """Images to `pixel_values` [P, 3, p, p] and `grid_thws` [images, 3]. Raises ImageError."""
        batch = self.settings.preprocess(_images(images, medias))
        return BatchFeature(_patches(batch), tensor_type=return_tensors)

    def media_tokens_calculator(self, media: Any) -> int:
        """How many rows of the text model's input an image takes."""
        (image,) = _images(media, None)
        return self.settings.plan(*image.size).features

    @staticmethod
    def make_image_prompt(width: int, height: int) -> str:
        """The text that stands for an image of this size."""
        return image_prompt(width, height)


class KimiK3Processor(ProcessorMixin):
    """Tokenizer and image processor together: conversations, or texts, with images, to what the model takes."""

    image_token = MEDIA_PAD

    def __init__(self, image_processor: KimiK3ImageProcessor, tokenizer: KimiK3Tokenizer) -> None:
        super().__init__(image_processor, tokenizer)
        self.image_token_id = tokenizer.segments.control(MEDIA_PAD)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **_: Any) -> KimiK3Processor:  # type: ignore[override]
        """Read a checkpoint folder. Raises TokenizerError and ImageError."""
        folder = Path(pretrained_model_name_or_path)
        return cls(KimiK3ImageProcessor.from_pretrained(folder), KimiK3Tokenizer.from_pretrained(folder))

    @property
    def media_processor(self) -> KimiK3ImageProcessor:
        """The published name of the image processor."""
        return self.image_processor

    def __call__(
        self,
        images: Any = None,
        text: str | Sequence[str] = "",
        *,
        medias: Any = None,
        return_tensors: str | None = "pt",
        **unsupported: Any,
    ) -> BatchFeature:
        """Text to be continued as it is, with its images, as `text_prompt` has it.

        Text that has a `<|media_pad|>` for every image feature already is taken as it is.
        """
        _refuse(unsupported)
        texts = [text] if isinstance(text, str) else list(text)
        if len(texts) != 1:
            raise ValueError(f"the processor takes one text with its images at a time, not {len(texts)}")
        segments, settings, given = self.tokenizer.segments, self.image_processor.settings, _images(images, medias)
        ids = segments.encode_segment(texts[0], special=True)
        if given and ids.count(self.image_token_id) == sum(settings.plan(*image.size).features for image in given):
            prompt = Prompt(ids, settings.preprocess(given))
        else:
            prompt = text_prompt(segments, texts[0], given, settings)
        return self._together([prompt], return_tensors)

    def apply_chat_template(  # type: ignore[override]
        self,
        conversation: Conversations,
        *,
        tokenize: bool = False,
        return_dict: bool = False,
        return_tensors: str | None = None,
        **template: Any,
    ) -> Any:
        """A conversation with its images, or a list of them, padded on the left; `template` as for `render_options`.

        Text without `tokenize`, token ids with it, and with `return_dict` the patches of the images beside them.
        """
        several = _is_several(conversation)
        conversations = conversation if several else [conversation]
        if not tokenize:
            prompts = [[image_prompt(*image.size) for image in images_of(messages)] for messages in conversations]
            texts = [
                self.tokenizer.apply_chat_template(messages, tokenize=False, image_prompts=images, **template)
                for messages, images in zip(conversations, prompts, strict=True)
            ]
            return texts if several else texts[0]
        segments, settings = self.tokenizer.segments, self.image_processor.settings
        options = render_options(**template)
        together = self._together(
            [chat_prompt(segments, m, settings, **options) for m in conversations], return_tensors
        )
        return together if return_dict else together["input_ids"]

    def _together(self, prompts: Sequence[Prompt], return_tensors: str | None) -> BatchFeature:
        rows = {"input_ids": [prompt.token_ids for prompt in prompts]}
        data = dict(self.tokenizer.pad(rows, padding=len(prompts) > 1, padding_side="left"))
        batches = [prompt.images for prompt in prompts if prompt.images]
        if batches:
            patches = [_patches(batch) for batch in batches]
            data |= {key: torch.cat([part[key] for part in patches]) for key in patches[0]}
        return BatchFeature(data, tensor_type=return_tensors)


def register_auto_classes(config_class: type) -> None:
    """Let AutoProcessor and AutoTokenizer find these classes: for this kind of configuration, and by their names.

    The tokenizer by its name alone: were it tied to the configuration class too, AutoTokenizer would take the published
    folder, whose class is a file in it, for one that transformers has itself.
    """
    AutoProcessor.register(config_class, KimiK3Processor, exist_ok=True)
    REGISTERED_TOKENIZER_CLASSES["KimiK3Tokenizer"] = KimiK3Tokenizer


def render_options(
    *,
    thinking: bool | None = None,
    enable_thinking: bool | None = None,
    thinking_effort: str | None = "max",
    tools: Sequence[Any] | None = None,
    tool_choice: Any = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
    **unsupported: Any,
) -> dict[str, Any]:
    """What `apply_chat_template` takes, as options of `render`.

    Args:
        thinking: False leaves thinking out; `enable_thinking` is another name for it.
        thinking_effort: low, high or max, where the published tokenizer says max; None says nothing of effort.
        tool_choice: required or none; other values say nothing to the model.
    """
    _refuse(unsupported)
    if thinking is not None and enable_thinking is not None and thinking != enable_thinking:
        raise ValueError(f"thinking = {thinking} and enable_thinking = {enable_thinking} are the same switch")
    return {
        "thinking": thinking is not False and enable_thinking is not False,
        "effort": thinking_effort,
        "tools": tools,
        "tool_choice": tool_choice,
        "response_format": response_format,
        "add_generation_prompt": add_generation_prompt,
    }


def _refuse(unsupported: Mapping[str, Any]) -> None:
    """Arguments that transformers' own classes take and that would have an effect, which they do not have here."""
    used = {name: value for name, value in unsupported.items() if name not in _CONSTANTS}
    if passed := sorted(name for name, value in used.items() if value is not None and value is not False):
        raise TypeError(f"not supported here: {', '.join(passed)}")


def _is_several(conversation: Conversations) -> bool:
    return bool(conversation) and not isinstance(conversation[0], Mapping)


def _images(images: Any, medias: Any) -> list[Image.Image]:
    """One image or a list; each a PIL image, or the published form `{"type": "image", "image": ...}`."""
    given = images if images is not None else medias
    several = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [image["image"] if isinstance(image, Mapping) else image for image in several]


def _patches(batch: ImageBatch) -> dict[str, torch.Tensor]:
    return {"pixel_values": batch.pixels, "grid_thws": torch.tensor(batch.grids, dtype=torch.long).view(-1, 3)}
