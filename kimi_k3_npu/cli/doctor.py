"""`doctor`: whether an engine that is installed here will run our model, and what is missing."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

app = typer.Typer(help="Check the installation of an engine and of its plugin.")


@app.callback(invoke_without_command=True)
def versions(context: typer.Context) -> None:
    """List the versions of what this package stands on, and which its tests run on; or check an engine's plugin.

    Exits with 1 if they do not fit each other.
    """
    if context.invoked_subcommand is None:
        from kimi_k3_npu.engines.versions import examine

        findings = list(examine({"torch": "", "transformers": "", "torch_npu": "needed on Ascend"}))
        for finding in findings:
            typer.echo(f"{finding.kind:<8} {finding.text}")
        if any(finding.kind == "problem" for finding in findings):
            raise typer.Exit(1)


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
