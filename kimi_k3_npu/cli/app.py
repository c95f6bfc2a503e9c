"""The commands, and what happens when one fails."""

from __future__ import annotations

import functools
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup, TyperOption

from kimi_k3_npu import __version__
from kimi_k3_npu.cli import (
    batch,
    chat,
    doctor,
    evaluate,
    generate,
    info,
    kernels,
    layout,
    plan,
    recipe,
    selftest,
    weights,
)
from kimi_k3_npu.errors import KimiK3Error

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("chat")(chat.chat)
app.command("batch")(batch.batch)
app.command("generate")(generate.generate)
app.command("info")(info.info)
app.command("kernels")(kernels.kernels)
app.command("layout")(layout.layout)
app.command("plan")(plan.plan)
app.command("selftest")(selftest.selftest)
app.add_typer(doctor.app, name="doctor")
app.add_typer(evaluate.app, name="eval")
app.add_typer(recipe.app, name="recipe")
app.add_typer(weights.app, name="weights")


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that `args` (None: this process's) name, and exit: 0, 1 for an error, 2 for wrong usage."""
    warnings.showwarning = _show_warning
    # A terminal that cannot show a generated character, or a message that quotes bytes which are not UTF-8.
    for stream, errors in ((sys.stdout, "replace"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        command_tree()(args, prog_name="kimi-k3-npu")
    except KimiK3Error as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


@functools.cache
def command_tree() -> TyperGroup:
    """The commands. Their help shows no type beside a flag that takes no value."""
    root = cast("TyperGroup", typer.main.get_command(app))
    for command in _commands(root):
        for option in command.get_params(typer.Context(command)):
            if isinstance(option, TyperOption) and option.is_flag:
                option.metavar = ""
    return root


def _commands(root: Any) -> Iterator[Any]:
    yield root
    for command in getattr(root, "commands", {}).values():
        yield from _commands(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Kimi-K3 for Ascend NPUs: run, inspect and prepare its checkpoints."""


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(1)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    typer.echo(f"warning: {message}", err=True)
