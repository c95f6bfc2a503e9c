"""`doctor`: whether an engine that is installed here will run our model, and what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Check the installation of an engine and of its plugin.")


@app.callback()
def engines() -> None:
    """Check the installation of an engine and of its plugin."""


@app.command("sglang")
def sglang(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that `--model-impl kimi_k3_npu` will be served by this package, by trying what SGLang does at its start.

    Exits with 1 if something is wrong. Environment variables of this package are listed with what they do.
    """
    from kimi_k3_npu import envs
    from kimi_k3_npu.engines.sglang.installation import examine

    findings = list(examine())
    problems = [finding for finding in findings if finding.kind == "problem"]
    if as_json:
        result = {"findings": [asdict(finding) for finding in findings], "variables": envs.VARIABLES}
        typer.echo(json.dumps(result, indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.kind:<8} {finding.text}")
        typer.echo("\nEnvironment variables:")
        for name, meaning in envs.VARIABLES.items():
            typer.echo(f"  {name}\n      {meaning}")
        typer.echo(f"\n{len(problems) or 'no'} problem{'s' * (len(problems) != 1)}")
    if problems:
        raise typer.Exit(1)
