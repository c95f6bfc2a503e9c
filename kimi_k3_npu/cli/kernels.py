"""`kernels`: which NPU kernel each operator of the model takes, and why not another."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kimi_k3_npu.cli.numbers import MOST, MOST_RANKS
from kimi_k3_npu.errors import LaunchError

if TYPE_CHECKING:
    from rich.table import Table

    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.ops.device import Device
    from kimi_k3_npu.parallel.layout import ParallelLayout
    from kimi_k3_npu.plan.choices import LayerKernel

#: Columns of output that is not for a terminal.
WIDTH = 160


def kernels(
    attn_tp: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=MOST_RANKS, help="Ranks that share the attention heads.", show_default=False
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="Instead of --attn-tp, such as tp=64,dp=4,ep=64.", show_default=False),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens of a data-parallel replica in one step.")
    ] = "1,16,1024,8192",
    config: Annotated[
        str, typer.Option(metavar="DIR|full", help="Folder with a config.json, or the published full-size Kimi-K3.")
    ] = "full",
    soc: Annotated[
        str | None, typer.Option(help="a2, a3, a5, cpu or a chip name.", show_default="this machine's")
    ] = None,
    cann: Annotated[str | None, typer.Option(help="CANN version, such as 9.1.", show_default="this machine's")] = None,
    sgl_kernel_npu: Annotated[
        bool | None,
        typer.Option(
            "--sgl-kernel-npu/--no-sgl-kernel-npu", help="Assume this package.", show_default="if it is installed"
        ),
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the activations.")] = "bfloat16",
    context: Annotated[
        int, typer.Option(min=1, max=MOST, help="Tokens of a sequence in the cache, in a decode step.")
    ] = 4096,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which NPU kernel each operator takes for some numbers of tokens, and why not the ones before it.

    No weights and no NPU are needed. Decode is a step of N sequences of one token each, prefill one new sequence of N.
    """
    if (attn_tp is None) == (layout is None):
        raise typer.BadParameter("give one of --attn-tp and --layout")
    counts = parse_tokens(tokens)

    import torch

    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.plan.choices import Situation, layer_kernels, weight_kernels

    model = published_config() if config == "full" else _config_of(Path(config))
    device = _device(soc, cann, sgl_kernel_npu)
    ranks = _layout(attn_tp, layout, model)
    rows = []
    for T in counts:
        now = Situation(T, ranks, device, getattr(torch, dtype), context)
        rows += layer_kernels(model.text, now) + weight_kernels(model.text, now)
    assumed = {
        "config": config,
        "layout": str(ranks),
        "soc": device.soc,
        "cann": None if device.cann is None else str(device.cann),
        "packages": sorted(device.packages),
        "dtype": dtype,
        "context": context,
    }
    if as_json:
        typer.echo(json.dumps({**assumed, "kernels": [asdict(row) for row in rows]}, indent=2))
        return

    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    packages = ", ".join(device.packages) or "no optional kernel packages"
    console.print(f"{config}, {ranks}, {device.soc}, CANN {device.cann}, {packages}, {dtype}", highlight=False)
    console.print(_table(rows))


def parse_tokens(text: str) -> list[int]:
    """The numbers of a list such as 1,16,1024, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part[:11]) <= MOST for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list such as 1,16,1024", param_hint="--tokens")
    return list(dict.fromkeys(map(int, parts)))


def _config_of(folder: Path) -> KimiK3Config:
    from kimi_k3_npu.config import KimiK3Config

    return KimiK3Config.from_pretrained(folder)


def _layout(attn_tp: int | None, layout: str | None, model: KimiK3Config) -> ParallelLayout:
    """With --attn-tp, one replica over that many ranks, experts kept as whole as they can be."""
    from kimi_k3_npu.parallel.layout import ParallelLayout

    if layout is not None:
        return ParallelLayout.parse(layout)
    assert attn_tp is not None
    return ParallelLayout(tp=attn_tp, ep=math.gcd(attn_tp, model.text.num_experts))


def _device(soc: str | None, cann: str | None, sgl_kernel_npu: bool | None) -> Device:
    from kimi_k3_npu.ops.device import detect
    from kimi_k3_npu.ops.limits import SGL_KERNEL_NPU

    packages = None if sgl_kernel_npu is None else [SGL_KERNEL_NPU] * sgl_kernel_npu
    device = detect(soc=soc, cann=cann, packages=packages)
    if device.soc == "cpu" and soc is None:
        raise LaunchError("there is no NPU here; name the one to plan for, such as --soc a3 --cann 9.1")
    return device


def _table(rows: list[LayerKernel]) -> Table:
    """One line a choice: token counts for which an operator takes the same kernel, for the same reasons, share it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("where", "operator", "shape", "tokens", "kernel", "not, because"):
        table.add_column(column, overflow="fold")
    operators: dict[tuple[str, ...], dict[tuple[str, str], list[str]]] = {}
    for row in rows:
        name = row.op if row.phase == "any" else f"{row.op}, {row.phase}"
        reasons = "\n".join(f"{name}: {reason}" for name, reason in row.refused.items())
        choices = operators.setdefault((row.block, name, row.shape), {})
        choices.setdefault((row.kernel or "nothing to launch", reasons), []).append(str(row.tokens))
    for operator, choices in operators.items():
        for i, ((kernel, reasons), tokens) in enumerate(choices.items()):
            cells = (*(operator if i == 0 else ("", "", "")), ", ".join(tokens), kernel, reasons)
            table.add_row(*(Text(cell) for cell in cells))
    return table
