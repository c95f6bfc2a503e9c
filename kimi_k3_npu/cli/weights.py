"""`weights`: what is in checkpoints, and making them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="Make and inspect checkpoints.")


@app.callback()
def weights() -> None:
    """Make and inspect checkpoints."""


@app.command()
def tiny(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random weights.")] = 0,
    storage: Annotated[
        Literal["mxfp4", "bf16", "fp32"],
        typer.Option("--format", help="How weights are stored; mxfp4 packs the routed experts, as published."),
    ] = "mxfp4",
) -> None:
    """Write a small random checkpoint of the whole architecture, with a tokenizer, for tests and demonstrations."""
    from kimi_k3_npu.tiny import write_tiny

    write_tiny(out, seed=seed, storage=storage)
    size = sum(file.stat().st_size for file in out.iterdir())
    typer.echo(f"{out}: {size / 1e6:.1f} MB, {storage}, random weights (seed {seed}): what it generates means nothing")
