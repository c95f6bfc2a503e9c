"""What `generate` and `chat` share: their options, reading images, and running transformers' generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml

from kimi_k3_npu.cli.numbers import MOST, MOST_TEMPERATURE
from kimi_k3_npu.cli.progress import bytes_bar
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.recipes.requests import NO_SAMPLING

if TYPE_CHECKING:
    from torch import Tensor

    from kimi_k3_npu.chat.prompt import Prompt
    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.engines.transformers import KimiK3ForGeneration
    from kimi_k3_npu.images import ImageSettings

ModelFolder = Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint folder.", show_default=False)]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=MOST, help="Most tokens to generate.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, max=MOST_TEMPERATURE, help="0 takes the likeliest token; above 0 samples.")
]
TopP = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens up to this probability.")
]
Seed = Annotated[
    int | None, typer.Option(min=0, max=2**32 - 1, help="Makes sampling repeatable.", show_default="random")
]
ExpertWeights = Annotated[
    Literal["auto", "packed", "bf16", "int4x2"],
    typer.Option(
        help="Experts in memory: as stored (auto), that if it is packed (packed), expanded once (bf16), or MXFP4 as "
        "pairs of int4 (int4x2)."
    ),
]
Scan = Annotated[bool, typer.Option(help="Look into the weights while they are read, for NaN and other faults.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights; auto: the checkpoint's.")
]
Compile = Annotated[
    bool, typer.Option("--compile", help="Decode by a compiled graph: slow to start, then faster. CPU, C++ compiler.")
]
TextOnly = Annotated[bool, typer.Option("--text-only", help="Leave vision weights unread; then no images.")]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="An argument of the engine, such as tp_size=16.", show_default=False),
]


def check_sampling(temperature: float, top_p: float | None) -> float:
    """The temperature to use. Refuses what would have no effect."""
    if temperature < NO_SAMPLING:
        temperature = 0.0
    if top_p is not None and not temperature:
        raise typer.BadParameter("has no effect without --temperature above 0", param_hint="--top-p")
    return temperature


def engine_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Arguments of an engine, given as KEY=VALUE with the values in YAML."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--engine-arg")
        if key in found:
            raise typer.BadParameter(f"{key} is given twice", param_hint="--engine-arg")
        try:
            found[key] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError, ValueError):
            raise typer.BadParameter(f"the value of {key} is not YAML", param_hint="--engine-arg") from None
    return found


def image_settings(folder: Path, config: KimiK3Config) -> ImageSettings:
    """How images are prepared for this checkpoint. Raises ImageError when it takes none."""
    from kimi_k3_npu.images import ImageError, ImageSettings

    if config.vision is None:
        raise ImageError(f"{folder}: its config.json has no vision_config, so it takes no images")
    settings = ImageSettings.from_folder(folder)
    settings.check(config.vision)
    return settings


def load_network(
    folder: Path,
    dtype: str,
    expert_weights: Literal["auto", "packed", "bf16", "int4x2"],
    *,
    vision: bool | None,
    scan: bool = True,
    compiled: bool = False,
) -> KimiK3ForGeneration:
    """The model behind transformers, with a progress bar while it is read."""
    from kimi_k3_npu.engines.generation import check_folder
    from kimi_k3_npu.engines.transformers import KimiK3ForGeneration

    check_folder(folder)
    with bytes_bar("loading") as progress:
        network = KimiK3ForGeneration.from_pretrained(
            folder, dtype=dtype, expert_weights=expert_weights, vision=vision, scan=scan, progress=progress
        )
    if compiled:
        network.compile_decoding()
    return network


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises KimiK3Error unless there is something to continue, within the vocabulary."""
    if not ids:
        raise KimiK3Error("the prompt is empty; generation needs at least one token to continue")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise KimiK3Error(f"the prompt holds token id {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")


def sampling(
    network: KimiK3ForGeneration, max_new_tokens: int, temperature: float, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """Arguments of transformers' `generate`. What is not asked for comes from the folder's generation_config.json."""
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature:
        # Unless the folder says otherwise, all tokens: transformers' own default is the 50 likeliest.
        settings |= {"temperature": temperature, "top_k": network.generation_config.top_k or 0}
    if top_p is not None:
        settings["top_p"] = top_p
    if seed is not None:
        import torch

        torch.manual_seed(seed)
    return settings


def run(network: Any, prompt: Prompt, settings: dict[str, Any], on_token: Callable[[int], None]) -> list[int]:
    """The new token ids; `on_token` is called with each as it comes.

    `network` is a KimiK3ForGeneration: transformers' own types do not let a model with its own `from_pretrained` call
    `generate`.
    """
    import torch

    ids = torch.tensor([prompt.token_ids], device=network.device)
    images = {}
    if prompt.images:
        images = {"pixel_values": prompt.images.pixels, "grid_thws": torch.tensor(prompt.images.grids)}
    output = network.generate(
        ids, attention_mask=torch.ones_like(ids), streamer=_TokenCallback(on_token), **images, **settings
    )
    return output[0, len(prompt.token_ids) :].tolist()


def stop_ids(network: KimiK3ForGeneration) -> list[int]:
    """The tokens that end generation."""
    ids = network.generation_config.eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


class _TokenCallback:
    """A transformers streamer that calls `on_token` with each new token id."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._is_prompt = True

    def put(self, value: Tensor) -> None:
        """The prompt comes first, [1, T]; then new tokens, [1]."""
        if not self._is_prompt:
            self._on_token(int(value))
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is held back."""
