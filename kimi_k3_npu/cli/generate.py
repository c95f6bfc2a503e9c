"""`generate`: continue one prompt, with transformers doing the generation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k3_npu.cli import generation
from kimi_k3_npu.cli.progress import steps_bar
from kimi_k3_npu.errors import KimiK3Error

if TYPE_CHECKING:
    from kimi_k3_npu.chat.prompt import Prompt
    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.tokenizer import Tokenizer


def generate(
    model: generation.ModelFolder,
    prompt: Annotated[str | None, typer.Option(help="Text to continue, exactly as it is (no chat template).")] = None,
    token_ids: Annotated[
        str | None, typer.Option(metavar="IDS", help="Token ids to continue, such as 1,2,3; no tokenizer is needed.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Image before the prompt, or where it says <|kimi_image_placeholder|>. May be given several times.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: generation.MaxNewTokens = 64,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = None,
    seed: generation.Seed = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print as it is generated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    text_only: generation.TextOnly = False,
    expert_weights: generation.ExpertWeights = "auto",
    scan: generation.Scan = True,
    dtype: generation.Dtype = "auto",
    compiled: generation.Compile = False,
) -> None:
    """Continue a prompt and print the continuation: text for --prompt, token ids for --token-ids."""
    if (prompt is None) == (token_ids is None):
        raise typer.BadParameter("give one of --prompt and --token-ids")
    if image and prompt is None:
        raise typer.BadParameter("goes with --prompt", param_hint="--image")
    if image and text_only:
        raise typer.BadParameter("leaves no way to see an --image", param_hint="--text-only")
    if stream and as_json:
        raise typer.BadParameter("cannot stream JSON", param_hint="--stream")
    temperature = generation.check_sampling(temperature, top_p)
    given_ids = _parse_ids(token_ids or "")

    # What is wrong with the prompt is said before the weights are read, which can take long.
    from kimi_k3_npu.chat.prompt import Prompt
    from kimi_k3_npu.config import KimiK3Config

    config = KimiK3Config.from_pretrained(model)
    tokenizer = None if prompt is None else _load_tokenizer(model)
    if tokenizer is None or prompt is None:
        whole = Prompt(given_ids)
    else:
        whole = _read_prompt(model, config, tokenizer, prompt, image or [])
    generation.check_ids(whole.token_ids, config.text.vocab_size)

    vision = True if image else False if text_only else None
    network = generation.load_network(model, dtype, expert_weights, vision=vision, scan=scan, compiled=compiled)
    settings = generation.sampling(network, max_new_tokens, temperature, top_p, seed)
    start = time.perf_counter()
    with _progress(stream, tokenizer, max_new_tokens) as on_token:
        new_ids = generation.run(network, whole, settings, on_token)
    seconds = time.perf_counter() - start
    if stream:
        return
    text = None if tokenizer is None else tokenizer.decode(new_ids, skip_special=True)
    if not as_json:
        typer.echo(",".join(map(str, new_ids)) if text is None else text)
        return
    result = {
        "prompt_ids": whole.token_ids,
        "token_ids": new_ids,
        "text": text,
        "finish_reason": "stop" if new_ids[-1] in generation.stop_ids(network) else "length",
        "seconds": round(seconds, 4),
        "tokens_per_second": round(len(new_ids) / seconds, 2),
    }
    typer.echo(json.dumps(result, ensure_ascii=False))


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list such as 1,2,3", param_hint="--token-ids") from None


def _load_tokenizer(folder: Path) -> Tokenizer:
    from kimi_k3_npu.tokenizer import TokenizerError, load_tokenizer

    try:
        return load_tokenizer(folder)
    except TokenizerError as error:
        raise KimiK3Error(f"{error}; --token-ids works without one") from None


def _read_prompt(folder: Path, config: KimiK3Config, tokenizer: Tokenizer, text: str, files: list[Path]) -> Prompt:
    from kimi_k3_npu.chat.prompt import text_prompt
    from kimi_k3_npu.images import open_image

    settings = generation.image_settings(folder, config) if files else None
    return text_prompt(tokenizer, text, [open_image(file) for file in files], settings)


@contextmanager
def _progress(stream: bool, tokenizer: Tokenizer | None, max_new_tokens: int) -> Iterator[Callable[[int], None]]:
    """What is done with every new token: its text or id is printed, or a progress bar moves."""
    if not stream:
        with steps_bar("generating", max_new_tokens) as advance:
            yield lambda _: advance()
        return
    if tokenizer is None:
        separators = iter([""])
        yield lambda token: typer.echo(f"{next(separators, ',')}{token}", nl=False)
    else:
        from kimi_k3_npu.tokenizer import PieceStream

        pieces, hidden = PieceStream(tokenizer), tokenizer.hidden

        def show(token: int) -> None:
            for piece in pieces.feed(token):
                if not (piece.special and piece.text in hidden):
                    typer.echo(piece.text, nl=False)

        yield show
        typer.echo("".join(piece.text for piece in pieces.end()), nl=False)
    typer.echo()
