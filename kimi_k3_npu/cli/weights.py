"""`weights`: what is in checkpoints, whether it is right, and making them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kimi_k3_npu.cli import outputs
from kimi_k3_npu.cli.numbers import MOST_RANKS
from kimi_k3_npu.cli.progress import bytes_bar

if TYPE_CHECKING:
    from kimi_k3_npu.checkpoint.error_report import BlockError, ErrorReport
    from kimi_k3_npu.checkpoint.inspect import Inspection
    from kimi_k3_npu.errors import Fault

app = typer.Typer(no_args_is_help=True, help="Make, inspect, check and convert checkpoints.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder.", show_default=False)]
DEVICE = re.compile(r"cpu|(npu|cuda)(:\d{1,3})?", re.ASCII)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def weights() -> None:
    """Make, inspect, check and convert checkpoints."""


@app.command()
def tiny(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Folder to make.", callback=outputs.folder, show_default=False)
    ],
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


@app.command()
def inspect(folder: Folder, as_json: AsJson = False) -> None:
    """Say what is in a checkpoint folder, from its headers: format, tensors by pattern, and what is unusual."""
    from kimi_k3_npu.checkpoint.inspect import inspect as look

    found = look(folder)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        return
    typer.echo("\n".join(_inspection(found)))


@app.command()
def verify(
    folder: Folder,
    layout: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help="Check every rank of it too, such as tp=64,dp=4,ep=64.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="MANIFEST", help="A published manifest by name, or a file of `weights checksum`."),
    ] = None,
    data: Annotated[bool, typer.Option(help="Read all tensors, and not only the headers.")] = True,
    as_json: AsJson = False,
) -> None:
    """Find everything that is wrong with a checkpoint. Ends with 1 if anything is."""
    from kimi_k3_npu.checkpoint.verify import verify as check
    from kimi_k3_npu.errors import CheckpointError
    from kimi_k3_npu.parallel.layout import ParallelLayout

    parsed = ParallelLayout.parse(layout) if layout else None
    with bytes_bar("verifying") as progress:
        found = check(folder, layout=parsed, against=against, data=data, progress=progress)
    if as_json:
        lists = {"faults": list(map(asdict, found.faults)), "notes": list(map(asdict, found.notes))}
        typer.echo(json.dumps(lists, indent=2, ensure_ascii=False))
        raise typer.Exit(bool(found.faults))
    for note in _grouped(found.notes):
        typer.echo(f"note: {note}", err=True)
    if found.faults:
        raise CheckpointError.from_faults(folder, found.faults)
    assert found.checkpoint
    assert found.storage
    checks = [f"stored as {found.storage.name}", "all values read" if data else "headers only"]
    checks += [f"every rank of {parsed}"] if parsed else []
    checks += [f"the same as {against}"] if against else []
    tensors, size = len(found.checkpoint.entries), found.checkpoint.total_bytes
    typer.echo(f"{folder}: no fault in {tensors:,} tensors of {size / 1e9:,.3f} GB ({', '.join(checks)})")


@app.command()
def checksum(
    folder: Folder,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="File to write.", callback=outputs.file, show_default="DIR/checksums.json"
        ),
    ] = None,
) -> None:
    """Write the SHA-256 of every tensor, and config.json, to a file that `weights verify --against` takes."""
    from kimi_k3_npu.checkpoint.checksums import Checksums
    from kimi_k3_npu.checkpoint.reader import Checkpoint
    from kimi_k3_npu.locks import writing_to

    total, done = Checkpoint.open(folder).total_bytes, 0
    file = out or outputs.file(folder / "checksums.json")
    assert file
    with writing_to(file, "checksum"), bytes_bar("reading") as progress:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            progress(done, total)

        sums = Checksums.of(folder, on_bytes=count)
        sums.write(file)
    typer.echo(f"{file}: {len(sums.tensors):,} tensors")


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Checkpoint folder.", show_default=False)],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder to make, or to go on with.", callback=outputs.folder, show_default=False
        ),
    ],
    to: Annotated[
        Literal["bf16", "w4a8", "mxfp4", "int4x2"],
        typer.Option("--to", help="Form of the routed experts; int4x2 is MXFP4's values for hardware without FP4."),
    ],
    jobs: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Shards worked on at a time.")] = 1,
    device: Annotated[str, typer.Option(help="Where the arithmetic is done, such as npu:0.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Convert the routed experts of a checkpoint. After a kill, the same command goes on with what is missing."""
    if not DEVICE.fullmatch(device):
        raise typer.BadParameter(f"{device!r} is none of cpu, npu, npu:0 and the like, cuda", param_hint="--device")

    from kimi_k3_npu.checkpoint.convert import convert as run

    with bytes_bar("converting") as progress:
        report = run(source, out, to, jobs=jobs, device=device, progress=progress)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
        return
    typer.echo("\n".join(_errors(report)))
    typer.echo(f"{out}: {report.total.weights:,} weights as {to}")


def _inspection(found: Inspection) -> Iterable[str]:
    experts = f", routed experts {found.experts}" if found.experts else ""
    dtypes = ", ".join(f"{dtype} {_size(size)}" for dtype, size in found.dtypes.items())
    yield f"format   {found.storage or 'contradictory'}{experts}"
    yield f"tensors  {found.tensors:,} in {found.shards} files, {_size(found.bytes)} ({dtypes})"
    yield ""
    for pattern in found.patterns:
        kinds = "; ".join(
            f"{count:,} x {kind}" if len(pattern.kinds) > 1 else kind for kind, count in pattern.kinds.items()
        )
        yield f"{pattern.tensors:>9,}  {_size(pattern.bytes):>10}  {pattern.name}  {kinds}"
    for title, members in (("unusual", found.notes), ("faults", found.faults)):
        if members:
            yield ""
            yield from (f"{title}: {line}" for line in _grouped(members))


def _grouped(members: Iterable[Fault]) -> Iterable[str]:
    """One line for each kind."""
    kinds: dict[str, list[Fault]] = {}
    for member in members:
        kinds.setdefault(member.kind, []).append(member)
    for kind, found in kinds.items():
        others = f" (and {len(found) - 1:,} others)" if len(found) > 1 else ""
        yield f"{kind}: {found[0].name}: {found[0].detail}{others}"


def _errors(report: ErrorReport) -> Iterable[str]:
    width = max((len(name) for name in report.blocks), default=0)

    def line(name: str, error: BlockError) -> str:
        return f"{name:<{width}}  {error.weights:>7,}  {error.relative:>14.3e}  {error.cosine:>12.9f}"

    yield f"{'block':<{width}}  {'weights':>7}  {'relative error':>14}  {'cosine':>12}"
    yield from (line(name, error) for name, error in report.blocks.items())
    yield line("all", report.total)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.1 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
