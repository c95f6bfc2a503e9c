"""`layout`: which weights each rank of a parallel layout holds, or why the layout cannot be."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_k3_npu.cli.numbers import MOST, MOST_RANKS

if TYPE_CHECKING:
    from rich.table import Table

    from kimi_k3_npu.parallel.layout import ParallelLayout
    from kimi_k3_npu.plan.weights import BlockWeights, RankWeights

#: Columns of output that is not for a terminal.
WIDTH = 120


def layout(
    tp: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="Ranks of one pipeline stage.", show_default="1")
    ] = None,
    dp: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Data-parallel replicas of attention, inside tp.", show_default="1"),
    ] = None,
    ep: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RANKS, help="Ranks to deal experts out over.", show_default="1; tp with an all-to-all"
        ),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="Pipeline stages, each of tp ranks.", show_default="1")
    ] = None,
    dispatch: Annotated[
        Literal["gather", "alltoall", "mc2"] | None,
        typer.Option(help="How tokens reach experts.", show_default="gather"),
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(metavar="attn_tp|N", help="Split the shared experts, with an all-to-all.", show_default="whole"),
    ] = None,
    dense: Annotated[
        Literal["tp", "attn_tp"] | None, typer.Option(help="Split the dense MLP over.", show_default="tp")
    ] = None,
    lm_head: Annotated[
        Literal["tp", "dp"] | None,
        typer.Option(help="Split the vocabulary over tp, or within each replica (dp).", show_default="tp"),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            "--layout", metavar="LAYOUT", help="Instead of these, such as tp=64,dp=4,ep=64.", show_default=False
        ),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, max=MOST, help="The rank to describe.")] = 0,
    config: Annotated[
        str, typer.Option(metavar="DIR|full", help="Folder with a config.json, or the published full-size Kimi-K3.")
    ] = "full",
    experts: Annotated[
        Literal["mxfp4", "int4x2", "w4a8", "bf16"] | None,
        typer.Option(help="How routed experts are kept in memory; bf16: plain.", show_default="as stored"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show which weights a rank of a parallel layout holds, in bytes, split or replicated; no weights are needed.

    A layout that cannot be is an error that says what would work.
    """
    options = {
        "tp": tp,
        "dp": dp,
        "ep": ep,
        "pp": pp,
        "dispatch": dispatch,
        "shared": shared,
        "dense": dense,
        "lm_head": lm_head,
    }
    given = {key: value for key, value in options.items() if value is not None}
    if text is not None and given:
        raise typer.BadParameter(f"give --layout or --{next(iter(given)).replace('_', '-')}, not both")

    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.formats import expert_formats
    from kimi_k3_npu.plan.weights import rank_weights

    model = published_config() if config == "full" else KimiK3Config.from_pretrained(Path(config))
    with _collected() as notes:
        ranks = _layout(text if text is not None else ",".join(f"{key}={value}" for key, value in given.items()))
    for note in notes:
        warnings.warn(note, stacklevel=1)
    kept = (model.quantization or "plain") if experts is None else expert_formats()[experts].name
    held = rank_weights(model, ranks, rank, experts=kept)
    if as_json:
        typer.echo(json.dumps(_as_json(held, notes), indent=2))
        return

    from rich.console import Console

    for line in _in_words(held):
        typer.echo(line)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(held))


def _layout(text: str) -> ParallelLayout:
    """The layout with what SGLang's former environment variables add to it."""
    from kimi_k3_npu import envs
    from kimi_k3_npu.parallel.layout import ParallelLayout

    keys = {item.partition("=")[0].strip() for item in text.split(",")}
    options = {"shared": "enable_shared_experts_attn_tp", "dense": "enable_dense_mlp_attn_tp"}
    given = frozenset(option for key, option in options.items() if key in keys)
    return ParallelLayout.parse(text).with_former_variables(envs.former(), given=given)


@contextmanager
def _collected() -> Iterator[list[str]]:
    """The warnings of the block, each once, instead of their being shown."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += dict.fromkeys(str(warning.message) for warning in caught)


def _as_json(held: RankWeights, notes: list[str]) -> dict[str, Any]:
    layout = held.layout
    return {
        "layout": str(layout),
        "options": asdict(layout),
        "ranks": layout.world,
        "attn_tp": layout.attn_tp,
        "rank": held.rank,
        "stage": held.stage,
        "layers": {"first": held.layers[0], "last": held.layers[-1]},
        "blocks": [asdict(block) | {"total": block.total} for block in held.blocks],
        "total": held.total,
        "warnings": notes,
    }


def _in_words(held: RankWeights) -> Iterator[str]:
    layout = held.layout
    replica, within = divmod(held.rank % layout.tp, layout.attn_tp)
    yield f"{layout}: {layout.world} ranks, attn_tp = {layout.attn_tp}"
    yield (
        f"rank {held.rank}: layers {held.layers[0]}..{held.layers[-1]} (stage {held.stage} of {layout.pp}), "
        f"replica {replica} of {layout.dp}, rank {within} of {layout.attn_tp} in it"
    )


def _table(held: RankWeights) -> Table:
    """One line a block, in GB."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_footer=True)
    total = held.total
    table.add_column("block", "total")
    table.add_column("split over")
    table.add_column("this rank has")
    for name in ("sharded", "replicated", "derived"):
        table.add_column(name, _gigabytes(sum(getattr(block, name) for block in held.blocks)), justify="right")
    table.add_column("GB", _gigabytes(total), justify="right")
    for block in held.blocks:
        table.add_row(block.block, *_place(block), *map(_gigabytes, _sizes(block)))
    return table


def _place(block: BlockWeights) -> tuple[str, str]:
    if not block.parts:
        return "-", "all"
    return ", ".join(f"{part.axis} = {part.ways}" for part in block.parts), ", ".join(map(str, block.parts))


def _sizes(block: BlockWeights) -> tuple[int, ...]:
    return block.sharded, block.replicated, block.derived, block.total


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.3f}" if size else "-"
