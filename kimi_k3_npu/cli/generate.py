"""`generate`: continue one prompt, with transformers doing the generation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_k3_npu.cli.progress import bytes_bar, steps_bar
from kimi_k3_npu.cli.tokenizer import load_tokenizer
from kimi_k3_npu.errors import KimiK3Error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kimi_k3_npu.engines.transformers import KimiK3ForGeneration

#: Temperatures below this are 0, as in serving engines: logits divided by less would overflow.
NO_SAMPLING = 1e-5


def generate(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Checkpoint folder.", show_default=False)],
    prompt: Annotated[str | None, typer.Option(help="Text to continue, exactly as it is (no chat template).")] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="Token ids to continue, such as 1,2,3; no tokenizer is needed.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token; above 0 samples.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens up to this probability.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Makes sampling repeatable.", show_default="random")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print as it is generated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    expert_weights: Annotated[
        Literal["auto", "packed", "bf16"],
        typer.Option(help="MXFP4 experts in memory: packed, expanded once (bf16), or as stored (auto)."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights; auto: the checkpoint's.")
    ] = "auto",
) -> None:
    """Continue a prompt and print the continuation: text for --prompt, token ids for --token-ids."""
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give one of --prompt and --token-ids")
    if temperature < NO_SAMPLING:
        temperature = 0.0
    if top_p is not None and not temperature:
        raise typer.BadParameter("has no effect without --temperature above 0", param_hint="--top-p")
    if stream and as_json:
        raise typer.BadParameter("cannot stream JSON", param_hint="--stream")
    given_ids = _parse_ids(token_ids or "")

    # What is wrong with the prompt is said before the weights are read, which can take long.
    from kimi_k3_npu.config import KimiK3Config

    vocab_size = KimiK3Config.from_pretrained(model).text.vocab_size
    tokenizer = None if prompt is None else load_tokenizer(model)
    prompt_ids = given_ids if tokenizer is None else tokenizer(prompt).input_ids
    _check_ids(prompt_ids, vocab_size)

    from kimi_k3_npu.engines.transformers import KimiK3ForGeneration

    with bytes_bar("loading") as progress:
        network = KimiK3ForGeneration.from_pretrained(
            model, dtype=dtype, expert_weights=expert_weights, progress=progress
        )
    settings = _settings(network, max_new_tokens, temperature, top_p, seed)
    start = time.perf_counter()
    with _streamer(stream, tokenizer, max_new_tokens) as streamer:
        new_ids = _run(network, prompt_ids, settings, streamer)
    seconds = time.perf_counter() - start
    if stream:
        return
    text = None if tokenizer is None else tokenizer.decode(new_ids, skip_special_tokens=True)
    if not as_json:
        typer.echo(",".join(map(str, new_ids)) if text is None else text)
        return
    result = {
        "prompt_ids": prompt_ids,
        "token_ids": new_ids,
        "text": text,
        "finish_reason": "stop" if new_ids[-1] in _stop_ids(network) else "length",
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(new_ids) / seconds, 2),
    }
    typer.echo(json.dumps(result, ensure_ascii=False))


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list such as 1,2,3", param_hint="--token-ids") from None


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if not ids:
        raise KimiK3Error("the prompt is empty; generation needs at least one token to continue")
    if outside := [i for i in ids if not 0 <= i < vocab_size]:
        raise KimiK3Error(f"the prompt holds token id {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")


def _settings(
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
        from transformers import set_seed

        set_seed(seed)
    return settings


def _run(network: Any, prompt_ids: list[int], settings: dict[str, Any], streamer: Any) -> list[int]:
    """The new token ids. transformers' own types do not let a model with its own `from_pretrained` call `generate`."""
    import torch

    ids = torch.tensor([prompt_ids], device=network.device)
    output = network.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **settings)
    return output[0, len(prompt_ids) :].tolist()


def _stop_ids(network: KimiK3ForGeneration) -> list[int]:
    ids = network.generation_config.eos_token_id
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


@contextmanager
def _streamer(stream: bool, tokenizer: PreTrainedTokenizerBase | None, max_new_tokens: int) -> Iterator[Any]:
    """What transformers tells of every new token: a printer of text or ids, or a progress bar."""
    if not stream:
        with steps_bar("generating", max_new_tokens) as advance:
            yield TokenCallback(lambda _: advance())
    elif tokenizer is None:
        separators = iter([""])
        yield TokenCallback(lambda i: typer.echo(f"{next(separators, ',')}{i}", nl=False))
        typer.echo()
    else:
        from transformers import TextStreamer

        yield TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


class TokenCallback:
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
