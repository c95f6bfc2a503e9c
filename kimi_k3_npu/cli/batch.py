"""`batch`: answers to a file of prompts, to be interrupted and gone on with at any time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kimi_k3_npu.cli import generation, outputs
from kimi_k3_npu.cli.numbers import MOST
from kimi_k3_npu.cli.progress import steps_bar


def batch(
    model: generation.ModelFolder,
    prompts: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Prompts: a line of text each, or of JSON (.jsonl).", show_default=False),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Results, a line of JSON each.",
            callback=outputs.file_with_folders,
            show_default=False,
        ),
    ],
    engine: Annotated[Literal["transformers", "sglang", "vllm"], typer.Option(help="What generates.")] = "transformers",
    engine_arg: generation.EngineArgs = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Prompts at a time.", show_default="8; sglang, vllm: 256")
    ] = None,
    max_new_tokens: generation.MaxNewTokens = 64,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = None,
    seed: generation.Seed = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Of chats: think first.")] = True,
    input_format: Annotated[
        Literal["auto", "text", "jsonl"], typer.Option(help="Of the prompts; auto goes by the file's name.")
    ] = "auto",
) -> None:
    """Generate for every prompt of a file. Run it again to go on after an interruption: no answer is lost or repeated.

    A line of JSON has one of prompt, token_ids and messages (a chat), and may have an id; or it is a request of
    OpenAI's batches. Lines that cannot be used are reported and skipped; a file without one that can is an error.
    """
    temperature = generation.check_sampling(temperature, top_p)
    options = generation.engine_options(engine_arg or [])

    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.engines.offline import open_engine
    from kimi_k3_npu.lines import is_json_lines
    from kimi_k3_npu.recipes.offline import BatchError, BatchSettings, Results, read_requests, run_batch
    from kimi_k3_npu.tokenizer import TokenizerError, load_tokenizer

    vocab_size = KimiK3Config.from_pretrained(model).text.vocab_size
    try:
        tokenizer = load_tokenizer(model)
    except TokenizerError:
        tokenizer = None  # lines with token ids need none, and the others say so
    as_json = input_format == "jsonl" or (input_format == "auto" and is_json_lines(prompts))
    requests, bad = read_requests(prompts, tokenizer, vocab_size, as_json=as_json, thinking=thinking)
    for line in bad:
        typer.echo(f"{prompts}:{line.line}: skipped: {line.reason}", err=True)
    if not requests:
        raise BatchError(f"{prompts}: " + (f"all {len(bad)} lines were skipped" if bad else "holds no prompts"))
    settings = BatchSettings(
        model=str(model.resolve()),
        engine=engine,
        engine_args=options,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        thinking=thinking,
    )
    with Results(out, settings) as results:
        left = len(results.missing(requests))
        if left:
            running = open_engine(engine, model, options)
            try:
                with steps_bar("answering", left) as advance:
                    window = batch_size or (8 if engine == "transformers" else 256)
                    run_batch(running, requests, results, settings, tokenizer, window=window, advance=advance)
            finally:
                running.close()
    before = len(requests) - left
    skipped = f", {len(bad)} lines skipped" if bad else ""
    typer.echo(f"{out}: {left} answers written, {before} were there{skipped}", err=True)
