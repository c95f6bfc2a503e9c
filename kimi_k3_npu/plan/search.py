"""The layouts that a cluster can run, best first."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.plan.dry_run import Rank
from kimi_k3_npu.plan.hardware import Bound, Chip, bound, missing
from kimi_k3_npu.plan.memory import Memory, memory
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.schema import CheckpointFormat
from kimi_k3_npu.recipes.serving import Serving

#: Pipeline stages that are tried.
STAGES = (1, 2, 4)


@dataclass(frozen=True)
class Candidate:
    """One layout that fits: the memory of its fullest rank, and the bound of a decode step with all requests."""

    layout: ParallelLayout
    memory: Memory
    bound: Bound | None
    #: Tokens of all replicas' caches together.
    tokens: int


@dataclass(frozen=True)
class Refused:
    """One layout that does not, and why."""

    layout: str
    reason: str


def layouts(world: int, config: KimiK3Config, stages: tuple[int, ...]) -> Iterator[ParallelLayout]:
    """Every layout over `world` ranks that splits the heads: with whole experts where they go over the ranks, else
    without an all-to-all; shared experts split over a replica or whole."""
    text = config.text
    heads = math.gcd(text.num_attention_heads, text.kda_num_heads)
    for pp in stages:
        tp = world // pp
        for dp in (n for n in range(1, tp + 1) if world % pp == 0 and tp % n == 0 and heads % (tp // n) == 0):
            common: dict[str, Any] = {"tp": tp, "dp": dp, "pp": pp}
            common |= {"enable_dense_mlp_attn_tp": dp > 1, "enable_dp_lm_head": dp > 1}
            if text.num_experts % tp == 0:
                for shared in {True, False} if tp // dp > 1 else {False}:
                    options = {"ep": tp, "moe_dispatch": "alltoall", "enable_shared_experts_attn_tp": shared}
                    yield from _legal({**common, **options}, config)
            yield from _legal({**common, "ep": math.gcd(tp, text.num_experts)}, config)


def _legal(options: dict[str, Any], config: KimiK3Config) -> Iterator[ParallelLayout]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layout = ParallelLayout(**options)
            layout.check(config.text)
        except LayoutError:
            return
        yield layout


def search(
    config: KimiK3Config,
    wanted: Serving,
    form: CheckpointFormat,
    world: int,
    *,
    total: int,
    concurrency: int,
    device: Device | None,
    chip: Chip | None,
) -> tuple[list[Candidate], list[Refused]]:
    """The layouts over `world` ranks in which `concurrency` requests of `wanted.context` tokens fit, fastest decode
    first; without a chip whose figures are known, most room first."""
    found, refused = [], []
    for layout in layouts(world, config, STAGES):
        of = replace(
            wanted,
            layout=layout,
            requests=-(-concurrency // layout.dp),
            state_slots=None,
        )
        try:
            each = [memory(config, of, form, total=total, stage=stage, device=device) for stage in range(layout.pp)]
        except LayoutError as error:
            refused.append(Refused(str(layout), str(error)))
            continue
        fullest = min(each, key=lambda one: one.tokens)
        room = fullest.requests_of(of.context)
        if fullest.short:
            refused.append(Refused(str(layout), f"{fullest.short / 1e9:.1f} GB a die too much"))
        elif room < of.requests:
            refused.append(Refused(str(layout), f"room for {room} requests a replica, {of.requests} wanted"))
        else:
            least = decode_bound(config, of, form, chip) if chip and not missing(chip) else None
            found.append(Candidate(layout, fullest, least, max(0, fullest.tokens) * layout.dp))
    return sorted(found, key=_rank), refused


def decode_bound(config: KimiK3Config, of: Serving, form: CheckpointFormat, chip: Chip) -> Bound:
    """The bound of a decode step of all requests: a request waits for every stage in turn."""
    stages = []
    for stage in range(of.layout.pp):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rank = Rank(config, of.layout, form, stage * of.layout.tp, vision=False, own_model=of.own_model)
        stages.append(bound(chip, rank.sample("decode", of.requests, of.rows, of.context)))
    return Bound(
        memory=sum(one.memory for one in stages),
        compute=sum(one.compute for one in stages),
        link=sum(one.link for one in stages),
        sources=stages[0].sources,
    )


def _rank(of: Candidate) -> tuple[float, int]:
    return (of.bound.one_after_the_other if of.bound else 0.0, -of.tokens)


def nearest(subject: Subject) -> str | None:
    """The layout over the same dies that fits and changes the fewest sizes; None if none fits."""
    of, total = subject.serving, subject.launch.recipe.hardware.memory_gib_per_die
    assert of is not None
    assert total is not None
    now = of.layout
    options = sorted(layouts(now.world, subject.config, (now.pp,)), key=lambda other: _changes(now, other))
    for layout in options:
        try:
            least = memory(
                subject.config,
                replace(of, layout=layout),
                subject.form,
                total=subject.memory[0].total,
                device=subject.device,
                extra_weights=subject.extra_weights,
            )
        except LayoutError:
            continue
        if not least.short:
            return str(layout)
    return None


def _changes(now: ParallelLayout, other: ParallelLayout) -> tuple[int, int]:
    """How many parts of the layout differ, and how much larger or smaller attention TP is."""
    differ = set(str(now).split(",")) ^ set(str(other).split(","))
    return len(differ), abs(now.attn_tp - other.attn_tp)
