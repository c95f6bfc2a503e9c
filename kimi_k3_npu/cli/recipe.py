"""`recipe`: the launches that come with the package, as scripts for each node."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_k3_npu.errors import KimiK3Error

if TYPE_CHECKING:
    from kimi_k3_npu.plan.finding import Finding
    from kimi_k3_npu.recipes.launch import Launch
    from kimi_k3_npu.recipes.schema import Recipe, Role, Setting

app = typer.Typer(no_args_is_help=True, help="Launch recipes: list them, look into them, make the scripts of a node.")

NAME = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A recipe's name, or a YAML file.", show_default=False)]
SET = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="An input, a flag or a variable; off takes it away.", show_default=False
    ),
]


@app.callback()
def recipe() -> None:
    """Launch recipes: list them, look into them, make the scripts of a node."""


@app.command("list")
def list_recipes(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the recipes that come with the package."""
    from kimi_k3_npu.recipes.reader import load_recipe, recipe_names

    found = [load_recipe(name) for name in recipe_names()]
    if as_json:
        typer.echo(json.dumps([_summary(one) for one in found], indent=2))
        return
    width = max(len(one.name) for one in found)
    for one in found:
        typer.echo(f"{one.name:<{width}}  {one.status:<10}  {one.title}")


@app.command()
def show(name: NAME, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show a recipe: its cluster, flags and variables with their reasons and sources, and what was measured."""
    from kimi_k3_npu.recipes.reader import load_recipe

    one = load_recipe(name)
    if as_json:
        typer.echo(json.dumps(asdict(one), indent=2, ensure_ascii=False))
        return
    typer.echo("\n".join(_in_words(one)))


@app.command()
def render(
    name: NAME,
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", help="Node of the launch, from 0.", show_default=False)
    ] = None,
    role: Annotated[
        str | None, typer.Option(help="Instead, a role without nodes of its own, such as router.", show_default=False)
    ] = None,
    master_addr: Annotated[str | None, typer.Option(metavar="A", help="Address of node 0.", show_default=False)] = None,
    model_path: Annotated[
        str | None, typer.Option(metavar="P", help="Folder of the checkpoint on the node.", show_default=False)
    ] = None,
    settings: SET = None,
    form: Annotated[Literal["bash", "docker"], typer.Option("--format", help="What to make.")] = "bash",
    force: Annotated[bool, typer.Option("--force", help="Print the script although the checks find errors.")] = False,
) -> None:
    """Print the script that starts one node, after checking the launch. Warnings are in the script's head."""
    if (node_rank is None) == (role is None):
        raise typer.BadParameter("give one of --node-rank and --role")

    from kimi_k3_npu.recipes.launch import resolve
    from kimi_k3_npu.recipes.reader import load_recipe
    from kimi_k3_npu.recipes.render import bash, docker

    one = load_recipe(name)
    given = parse_settings(settings or [])
    image = given.pop("image", None)
    given |= {
        key: value for key, value in (("master_addr", master_addr), ("model_path", model_path)) if value is not None
    }
    chosen, rank = one.place(node_rank) if node_rank is not None else (_role(one, role or ""), 0)
    launch = resolve(one, chosen.name, rank, given)
    findings = check(launch)
    errors = [str(finding) for finding in findings if finding.level == "error"]
    if errors and not force:
        lines = "\n".join(f"  {error}" for error in errors)
        raise KimiK3Error(f"{one.name} would not run as asked:\n{lines}\n--force prints the script all the same")
    remarks = [str(finding) for finding in findings] or ["Checks: nothing found."]
    typer.echo(bash(launch, remarks) if form == "bash" else docker(launch, remarks, image), nl=False)


def check(launch: Launch) -> list[Finding]:
    """What the checks find for the published model."""
    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.plan.checks import check_launch
    from kimi_k3_npu.plan.subject import Subject

    return check_launch(Subject(launch, model_config(launch.recipe) or published_config()))


def model_config(of: Recipe) -> Any:
    """The configuration of the recipe's model where it is not the published one: None for that."""
    if of.hardware.soc != "cpu":
        return None
    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.tiny import tiny_config

    return KimiK3Config.from_hf(tiny_config())


def parse_settings(pairs: Iterable[str]) -> dict[str, str]:
    """key=value, each once."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--set")
        if (key := key.strip()) in found:
            raise typer.BadParameter(f"{key} is given twice", param_hint="--set")
        found[key] = value
    return found


def _role(one: Recipe, name: str) -> Role:
    services = [role.name for role in one.roles.values() if not role.nodes]
    if name not in services:
        raise KimiK3Error(
            f"{one.name} has {', '.join(services) or 'no role without nodes'}, not {name!r}; use --node-rank"
        )
    return one.roles[name]


def _summary(one: Recipe) -> dict[str, Any]:
    return {
        "name": one.name,
        "title": one.title,
        "status": one.status,
        "engine": f"{one.engine.name} {one.engine.version}",
        "hardware": asdict(one.hardware),
        "format": one.checkpoint.format,
    }


def _in_words(one: Recipe) -> Iterator[str]:
    hardware, engine = one.hardware, one.engine
    yield f"{one.title}\n"
    yield f"name        {one.name}"
    yield f"status      {one.status}; source: {one.sources[one.source]}"
    memory = f" of {hardware.memory_gib_per_die:g} GiB" if hardware.memory_gib_per_die else ""
    cann = f", CANN {hardware.cann}" if hardware.cann else ""
    yield f"hardware    {hardware.nodes} x {hardware.soc}, {hardware.dies_per_node} dies{memory} each{cann}"
    yield f"engine      {engine.name} {engine.version}, flags checked against {engine.flags}"
    yield f"checkpoint  {one.checkpoint.target} ({one.checkpoint.format})"
    if one.checkpoint.draft:
        yield f"draft       {one.checkpoint.draft}"
    if one.container:
        yield f"image       {one.container.image or 'not given by the source'}"
    for note in one.notes:
        yield f"note        {note}"
    for key, entry in one.inputs.items():
        default = f"default {entry.default}" if entry.default is not None else f"asked for, such as {entry.example}"
        yield f"input       {key}: {entry.what} ({default})"
    for role in one.roles.values():
        yield from _role_in_words(role)
    for measured in one.measured:
        numbers = ", ".join(f"{key} {value:g}" for key, value in measured.numbers.items())
        yield f"\nmeasured    {measured.what}: {numbers}\n            {one.sources[measured.source]}"
    if one.derived:
        yield "\nnot given by the source:"
        yield from (f"  {path}: {reason}" for path, reason in one.derived.items())
    yield from (f"\nknown       {name}: {reason}" for name, reason in one.known_problems.items())
    yield "\nsources:"
    yield from (f"  {key}: {text}" for key, text in one.sources.items())


def _role_in_words(role: Role) -> Iterator[str]:
    nodes = f", {role.nodes} nodes" if role.nodes else ""
    yield f"\n{role.name}{nodes}: {' '.join(role.command)}"
    for settings, join in ((role.flags, " "), (role.environment, "=")):
        yield from (f"  {line}" for line in _settings(settings, join))
    for part in role.per_node:
        yield f"  nodes {', '.join(map(str, part.nodes))}:"
        for settings, join in ((part.flags, " "), (part.environment, "=")):
            yield from (f"    {line}" for line in _settings(settings, join))


def _settings(settings: Any, join: str) -> Iterator[str]:
    for name, setting in settings.items():
        value = "" if setting.value is True else f"{join}{_value(setting)}"
        source = f" [{setting.source}]"
        yield f"{name}{value}  # {setting.why}{source}" if setting.why else f"{name}{value}  #{source}"


def _value(setting: Setting) -> str:
    if isinstance(setting.value, dict):
        return json.dumps(setting.value)
    return " ".join(map(str, setting.value)) if isinstance(setting.value, list) else str(setting.value)
