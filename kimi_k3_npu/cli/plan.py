"""`plan`: whether a launch fits, which kernels it takes, what would go wrong, and what a step costs at least."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_k3_npu.cli.numbers import LEAST_OF_HARDWARE, MOST, MOST_MB, MOST_OF_HARDWARE, MOST_RANKS
from kimi_k3_npu.cli.recipe import SET, model_config, parse_settings
from kimi_k3_npu.errors import KimiK3Error

if TYPE_CHECKING:
    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.plan.dry_run import Pass
    from kimi_k3_npu.plan.hardware import Bound, Chip
    from kimi_k3_npu.plan.subject import Subject
    from kimi_k3_npu.recipes.schema import Recipe
    from kimi_k3_npu.recipes.serving import Serving

Format = Literal["bf16", "mxfp4", "w4a8", "w4a8-attn8", "int4x2"]

#: What a plan without a recipe assumes of a node: dies, and GiB of each. A chip may have more.
NODES: dict[str, tuple[int, float]] = {"a2": (8, 64.0), "a3": (16, 64.0), "a5": (8, 128.0)}


def plan(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE|FILE", help="A recipe to plan.", show_default=False)
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="LAYOUT", help="Instead, a layout, such as tp=64,dp=4,dispatch=alltoall,shared=attn_tp."),
    ] = None,
    search: Annotated[bool, typer.Option("--search", help="Instead, rank the layouts that fit the cluster.")] = False,
    settings: SET = None,
    soc: Annotated[Literal["a2", "a3", "a5"], typer.Option(help="NPU generation, without a recipe.")] = "a3",
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_RANKS, help="Nodes, without a recipe.", show_default="as many as the layout needs"
        ),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Of the checkpoint, without a recipe.")] = "w4a8",
    context: Annotated[
        int | None,
        typer.Option(
            "--context", "--max-tokens", min=1, max=MOST, help="Longest request, in tokens.", show_default="131072"
        ),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Requests at a time, of all replicas.", show_default="16")
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Tokens of a replica's largest prefill pass.", show_default="2048"),
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share for weights and pools, without a recipe.")
    ] = 0.85,
    slots: Annotated[int, typer.Option(min=1, max=MOST, help="State slots of a request, without a recipe.")] = 1,
    buffer_mb: Annotated[int, typer.Option(min=1, max=MOST_MB, help="HCCL_BUFFSIZE, without a recipe.")] = 200,
    model_impl: Annotated[
        Literal["kimi_k3_npu", "auto"], typer.Option(help="Whose model, without a recipe; auto is the engine's own.")
    ] = "kimi_k3_npu",
    cann: Annotated[str, typer.Option(help="CANN version, without a recipe.")] = "9.0.0",
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=LEAST_OF_HARDWARE,
            max=MOST_OF_HARDWARE,
            help="Memory of a die.",
            show_default="the recipe's, or 64; a5: 128",
        ),
    ] = None,
    reserved_gib: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=MOST_OF_HARDWARE,
            help="Of it, what the driver keeps: npu-smi shows it on an idle die (such as 3).",
        ),
    ] = 0.0,
    draft_gb: Annotated[
        float, typer.Option(min=0.0, max=MOST_OF_HARDWARE, help="Weights of a draft model on a die, in GB.")
    ] = 0.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Pass every layer at full size, without memory.")] = False,
    chip: Annotated[
        str | None, typer.Option(help="910c, 950dt, 950pr or 910b.", show_default="the recipe's, or the SoC's first")
    ] = None,
    memory_tbps: Annotated[
        float | None,
        typer.Option(
            min=LEAST_OF_HARDWARE,
            max=MOST_OF_HARDWARE,
            help="Memory bandwidth of a die, TB/s.",
            show_default="the chip's, if published",
        ),
    ] = None,
    bf16_tflops: Annotated[
        float | None,
        typer.Option(
            min=LEAST_OF_HARDWARE,
            max=MOST_OF_HARDWARE,
            help="Best rate of a die, TFLOP/s.",
            show_default="the chip's, if published",
        ),
    ] = None,
    link_gbps: Annotated[
        float | None,
        typer.Option(
            min=LEAST_OF_HARDWARE,
            max=MOST_OF_HARDWARE,
            help="What a die can send, GB/s.",
            show_default="the chip's, if published",
        ),
    ] = None,
    config: Annotated[
        str, typer.Option(metavar="DIR|full", help="Folder with a config.json, or the published full-size Kimi-K3.")
    ] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Work out what a launch does before it is made. No weights and no NPU are needed; errors end in exit code 1."""
    if sum((recipe is not None, layout is not None, search)) != 1:
        raise typer.BadParameter("give one of RECIPE, --layout and --search")
    if search and nodes is None:
        raise typer.BadParameter("needs --nodes", param_hint="--search")

    from kimi_k3_npu.plan.hardware import chip as find_chip
    from kimi_k3_npu.plan.memory import GIB

    figures = {"memory_bandwidth": memory_tbps, "bf16": bf16_tflops, "link": link_gbps}
    model = _model(config)
    reserved, draft = int(reserved_gib * GIB), int(draft_gb * 1e9)
    if recipe is not None:
        one = _with_sizes(_load(recipe), memory_gib)
        sizes = _recipe_sizes(one, context, concurrency, chunk)
        subjects = _of_recipe(one, {**sizes, **parse_settings(settings or [])}, model, reserved, draft)
    else:
        one = _bare(soc, nodes or 1, form, cann, memory_gib)
        wanted = _wanted(context or 1 << 17, concurrency or 16, chunk or 2048, memory_fraction, slots, buffer_mb)
        wanted = replace(wanted, own_model=model_impl == "kimi_k3_npu")
        if search:
            _search(one, wanted, concurrency or 16, model, reserved, find_chip(soc, chip, figures), as_json)
            return
        subjects = _of_layout(one, layout or "", nodes, wanted, concurrency or 16, model, reserved, draft)
    hardware = one.hardware
    die = None if hardware.soc == "cpu" else find_chip(hardware.soc, chip or hardware.chip, figures)
    _report(one, subjects, die, dry_run, as_json)


def _report(one: Recipe, subjects: list[Subject], die: Chip | None, dry_run: bool, as_json: bool) -> None:
    from kimi_k3_npu.plan.checks import check_launch
    from kimi_k3_npu.plan.report import as_data

    plans = []
    errors = False
    for subject in subjects:
        findings = check_launch(subject)
        errors |= any(finding.level == "error" for finding in findings)
        passes = list(_passes(subject, die)) if dry_run else []
        if as_json:
            plans.append(as_data(subject, findings, passes))
            continue
        for line in _lines(one, subject, [str(finding) for finding in findings], passes):
            typer.echo(line)
    if as_json:
        typer.echo(json.dumps({"recipe": one.name, "plans": plans}, indent=2))
    if errors:
        raise typer.Exit(1)


def _lines(
    one: Recipe, subject: Subject, findings: list[str], passes: list[tuple[Pass, Bound | None]]
) -> Iterator[str]:
    from kimi_k3_npu.plan.report import kernel_lines, kernel_uses, memory_lines, pass_lines, room_lines

    of = subject.serving
    yield f"{one.name}: {subject.launch.role.name}, {of.layout if of else 'no layout'}, {subject.form}"
    for memory in subject.memory:
        stage = f", stage {memory.stage}" if len(subject.memory) > 1 else ""
        yield f"\none rank{stage}, {memory.total / 1e9:.1f} GB:"
        yield from memory_lines(memory)
        yield from room_lines(memory, subject)
    if uses := kernel_uses(subject):
        yield f"\nkernels on {subject.device.soc}, CANN {subject.device.cann}:"
        yield from kernel_lines(uses)
    if passes:
        yield "\ndry run:"
        for done, least in passes:
            yield from pass_lines(done, least, one.measured)
    yield f"\n{len(findings)} findings{':' if findings else ''}"
    yield from (f"  {finding}" for finding in findings)
    yield ""


def _passes(subject: Subject, die: Chip | None) -> Iterator[tuple[Pass, Bound | None]]:
    """Every stage's passes, with their bounds where the chip's figures are known."""
    from kimi_k3_npu.plan.dry_run import dry_run
    from kimi_k3_npu.plan.hardware import bound, missing

    of = subject.serving
    if of is None:
        return
    if die is not None and (options := missing(die)):
        typer.echo(f"no bound: {die.name} has figures that are not published; give {', '.join(options)}", err=True)
        die = None
    memory = subject.memory[0] if subject.memory else None
    room = max(1, memory.tokens // of.requests) if memory and memory.tokens > 0 else of.context
    decode = (0, 0) if of.phase == "prefill" else (of.requests, of.rows)
    for stage in range(of.layout.pp):
        for done in dry_run(
            subject.config,
            of.layout,
            subject.form,
            prefill=of.chunk,
            decode=decode,
            context=max(of.rows, min(of.context, room)),
            stage=stage,
            own_model=of.own_model,
        ):
            yield done, None if die is None else bound(die, done)


def _search(
    one: Recipe,
    wanted: Serving,
    concurrency: int,
    model: KimiK3Config | None,
    reserved: int,
    die: Chip,
    as_json: bool,
) -> None:
    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.ops.device import Device, parse_cann
    from kimi_k3_npu.ops.limits import SGL_KERNEL_NPU
    from kimi_k3_npu.plan.hardware import missing
    from kimi_k3_npu.plan.memory import GIB
    from kimi_k3_npu.plan.report import search_lines
    from kimi_k3_npu.plan.search import search

    hardware = one.hardware
    if options := missing(die):
        typer.echo(f"ranked by room only: {die.name}'s figures are not published; give {', '.join(options)}", err=True)
    found, refused = search(
        model or published_config(),
        wanted,
        one.checkpoint.format,
        hardware.nodes * hardware.dies_per_node,
        total=int((hardware.memory_gib_per_die or 0) * GIB) - reserved,
        concurrency=concurrency,
        device=Device(hardware.soc, parse_cann(hardware.cann or "9.0.0"), frozenset({SGL_KERNEL_NPU})),
        chip=die,
    )
    if as_json:
        result = [
            {
                "layout": str(candidate.layout),
                "weight_bytes": candidate.memory.weight_bytes,
                "tokens": candidate.tokens,
                "step_seconds": candidate.bound and candidate.bound.one_after_the_other,
            }
            for candidate in found
        ]
        out = [{"layout": other.layout, "reason": other.reason} for other in refused]
        typer.echo(json.dumps({"layouts": result, "refused": out}, indent=2))
    else:
        for line in search_lines(found, refused):
            typer.echo(line)
    if not found:
        raise KimiK3Error(f"no layout over {hardware.nodes} nodes fits; use more nodes, or a shorter context")


def _model(config: str) -> KimiK3Config | None:
    """None for the published one, which a CPU recipe replaces by its own."""
    if config == "full":
        return None
    from kimi_k3_npu.config import KimiK3Config

    return KimiK3Config.from_pretrained(Path(config))


def _load(name: str) -> Recipe:
    from kimi_k3_npu.recipes.reader import load_recipe

    return load_recipe(name)


def _with_sizes(one: Recipe, memory_gib: float | None) -> Recipe:
    return one if memory_gib is None else replace(one, hardware=replace(one.hardware, memory_gib_per_die=memory_gib))


def _recipe_sizes(one: Recipe, context: int | None, concurrency: int | None, chunk: int | None) -> dict[str, str]:
    """The engine's own flags for the sizes that are asked for."""
    sglang = one.engine.name == "sglang"
    dp = 1
    if not sglang and one.serving_roles:
        flag = one.serving_roles[0].flags.get("--data-parallel-size")
        dp = int(flag.value) if flag else 1  # type: ignore[arg-type]
    if chunk is not None and sglang:
        chunk *= _dp(one)
    found: dict[str, Any] = {
        "--context-length" if sglang else "--max-model-len": context,
        "--max-running-requests" if sglang else "--max-num-seqs": concurrency and -(-concurrency // dp),
        "--chunked-prefill-size" if sglang else "--max-num-batched-tokens": chunk,
    }
    return {flag: str(value) for flag, value in found.items() if value is not None}


def _dp(one: Recipe) -> int:
    """SGLang's chunk is of all replicas together."""
    from kimi_k3_npu.recipes.serving import sglang_layout

    return sglang_layout({name: setting.value for name, setting in one.serving_roles[0].flags.items()}).dp


def _of_recipe(
    one: Recipe, given: dict[str, str], model: KimiK3Config | None, reserved: int, draft: int
) -> list[Subject]:
    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.plan.subject import Subject
    from kimi_k3_npu.recipes.launch import example_inputs, resolve

    inputs = {"node_addr": "192.168.0.10", **example_inputs(one), **given}
    config = model or model_config(one) or published_config()
    return [Subject(resolve(one, role.name, 0, inputs), config, reserved, draft) for role in one.serving_roles]


def _wanted(context: int, concurrency: int, chunk: int, fraction: float, slots: int, buffer_mb: int) -> Serving:
    from kimi_k3_npu.parallel.layout import ParallelLayout
    from kimi_k3_npu.recipes.serving import Serving

    return Serving(
        layout=ParallelLayout(),
        phase="both",
        chunk=chunk,
        requests=concurrency,
        context=context,
        rows=1,
        graph_batches=(),
        slots_per_request=slots,
        state_slots=None,
        memory_fraction=fraction,
        fraction_covers_all=False,
        buffer_mb=buffer_mb,
    )


def _bare(soc: Any, nodes: int, form: Format, cann: str, memory_gib: float | None) -> Recipe:
    """A launch of which only the cluster and the checkpoint's format are known."""
    from kimi_k3_npu.recipes.schema import Checkpoint, Engine, Hardware, Recipe, Role

    dies, memory = NODES[soc]
    role = Role(name="any", nodes=nodes, command=("",), set_up=(), unset=(), environment={}, flags={}, per_node=())
    return Recipe(
        name="layout",
        title="",
        status="unverified",
        source="",
        sources={},
        hardware=Hardware(soc=soc, nodes=nodes, dies_per_node=dies, memory_gib_per_die=memory_gib or memory, cann=cann),
        engine=Engine(name="sglang", version="", flags="sglang-0.5.23"),
        checkpoint=Checkpoint(format=form, target=""),
        container=None,
        inputs={},
        roles={"any": role},
        measured=(),
        notes=(),
        known_problems={},
        derived={},
    )


def _of_layout(
    one: Recipe,
    text: str,
    nodes: int | None,
    wanted: Serving,
    concurrency: int,
    model: KimiK3Config | None,
    reserved: int,
    draft: int,
) -> list[Subject]:
    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.parallel.layout import ParallelLayout
    from kimi_k3_npu.plan.subject import Subject
    from kimi_k3_npu.recipes.launch import Launch

    layout = ParallelLayout.parse(text)
    hardware = one.hardware
    if nodes is None:  # a part of a node is a node
        needed = max(1, -(-layout.world // hardware.dies_per_node))
        dies = min(layout.world, hardware.dies_per_node)
        hardware = replace(hardware, nodes=needed, dies_per_node=dies)
    role = replace(one.roles["any"], nodes=hardware.nodes)
    one = replace(one, hardware=hardware, roles={"any": role})
    launch = Launch(recipe=one, role=role, rank=0, command=(), flags={}, environment={}, inputs={})
    of = replace(wanted, layout=layout, requests=-(-concurrency // layout.dp))
    return [Subject(launch, model or published_config(), reserved, draft, given=of)]
