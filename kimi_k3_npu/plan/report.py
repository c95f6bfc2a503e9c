"""A plan in words and as data: what each rank holds, which kernels run, what was found, what a pass does at least."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kimi_k3_npu.plan.dry_run import Pass
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.hardware import Bound
from kimi_k3_npu.plan.memory import Memory
from kimi_k3_npu.plan.search import Candidate, Refused
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.schema import Measured

BAR = 40


@dataclass(frozen=True)
class KernelUse:
    """The kernel of an operator in one kind of pass."""

    phase: str
    tokens: int
    where: str
    op: str
    shape: str
    kernel: str
    refused: dict[str, str]


def kernel_uses(subject: Subject) -> list[KernelUse]:
    """The kernels of a prefill pass and of a decode step of one replica."""
    if subject.serving is None or subject.device.soc == "cpu":
        return []
    found = []
    for phase, tokens in subject.passes:
        experts = subject.expert_kernel(tokens)
        for row in (*subject.kernels(phase, tokens), *([experts] if experts else [])):
            kernel = row.kernel or "nothing to launch"
            found.append(KernelUse(phase, tokens, row.block, row.op, row.shape, kernel, dict(row.refused)))
    return found


def memory_lines(of: Memory) -> Iterator[str]:
    """One rank as a bar chart, in GB (1e9 bytes)."""
    parts: list[tuple[str, int]] = [(block, held.total) for block, held in of.weights.items()]
    parts += [("weights", of.weight_bytes), ("KDA states", of.states)]
    cache = max(0, of.pools - of.states)
    parts += [("cache rows", cache), ("activations", of.activations), ("HCCL buffers", of.buffers)]
    parts.append(("left over", of.total - of.weight_bytes - of.states - cache - of.activations - of.buffers))
    for name, size in parts:
        filled = min(BAR, max(0, round(BAR * size / of.total)))
        bar = "█" * filled if filled or not size > 0 else "▏"
        indent = "  " if name in of.weights else ""
        yield f"  {indent + name:<22}{size / 1e9:>8.2f}  {bar}"


def room_lines(of: Memory, subject: Subject) -> Iterator[str]:
    """What the memory is room for."""
    assert subject.serving is not None
    context = subject.serving.context
    yield f"  a token takes {of.kv_per_token:,} bytes of cache, a state slot {of.state_per_slot / 1e6:.1f} MB"
    slots = f"{of.slots} state slots ({of.slots_per_request} a request)"
    yield f"  a replica has room for {max(0, of.tokens):,} tokens beside {slots}"
    yield f"  or for {of.requests_of(context)} requests of {context:,} tokens, with their states"


def kernel_lines(uses: Iterable[KernelUse]) -> Iterator[str]:
    """One line an operator, with the kernels that refuse."""
    for use in uses:
        refused = "".join(f"; not {name}: {reason}" for name, reason in use.refused.items())
        place = f"{use.phase} of {use.tokens}"
        yield f"  {place:<18}{use.where:<12}{use.op:<18}{use.kernel}{refused}"


def pass_lines(done: Pass, least: Bound | None, measured: Iterable[Measured] = ()) -> Iterator[str]:
    """One pass of the dry run."""
    count = done.count
    yield (
        f"  {done.name}: {done.requests} requests x {done.queries} tokens a replica, {done.context:,} tokens each; "
        f"{count.launches:,} launches"
    )
    yield f"    {count.flops / 1e12:.3g} TFLOP, {count.bytes / 1e9:.2f} GB moved, {done.sent / 1e9:.3f} GB sent"
    yield (
        f"    no less than {done.compulsory / 1e9:.2f} GB: weights {count.weights / 1e9:.2f}, "
        f"cache rows {done.kv / 1e9:.2f}, states {done.states / 1e9:.2f}"
    )
    for (op, axis, ranks), (number, sent) in sorted(collectives(done).items()):
        yield f"    {number:>4} x {op:<15}{axis} of {ranks}: {sent / 1e9:.4f} GB"
    top = sorted(count.kernels.items(), key=lambda item: -item[1].bytes)[:6]
    for kernel, work in top:
        yield f"    {work.launches:>4} x {kernel:<20}{work.bytes / 1e9:>8.2f} GB {work.flops / 1e12:>9.3g} TFLOP"
    if least:
        parts = f"memory {least.memory * 1e3:.2f}, arithmetic {least.compute * 1e3:.2f}, links {least.link * 1e3:.2f}"
        serial = f"one after the other {least.one_after_the_other * 1e3:.2f}"
        yield f"    at least {least.seconds * 1e3:.2f} ms ({parts}; {serial})"
        if done.name == "decode" and done.queries > 1:
            each = least.seconds * 1e3 / done.queries
            yield f"    at least {each:.2f} ms a token, when all {done.queries} rows of a request are accepted"
        yield from (f"      {source}" for source in least.sources)
    if done.name == "decode":
        for one in measured:
            numbers = ", ".join(f"{key} {value:g}" for key, value in one.numbers.items())
            yield f"    published: {one.what}: {numbers}"


def collectives(done: Pass) -> dict[tuple[str, str, int], tuple[int, int]]:
    """How many collectives of each kind a pass has, and the bytes that they send."""
    number: Counter[tuple[str, str, int]] = Counter()
    sent: Counter[tuple[str, str, int]] = Counter()
    for one in done.collectives:
        key = (one.op, one.axis, one.ranks)
        number[key] += 1
        sent[key] += one.sent
    return {key: (number[key], sent[key]) for key in number}


def search_lines(found: list[Candidate], refused: list[Refused]) -> Iterator[str]:
    """The layouts of a search, best first, and why others are out."""
    for i, one in enumerate(found, 1):
        bound = f"{one.bound.one_after_the_other * 1e3:6.1f} ms a step" if one.bound else "no bound"
        weights, held = one.memory.weight_bytes / 1e9, f"{one.tokens:>12,} tokens"
        yield f"{i:>3}  {bound}  {weights:5.1f} GB weights  {held}  {one.layout}"
    if refused:
        yield f"{len(refused)} layouts do not fit:"
        yield from (f"     {one.layout}: {one.reason}" for one in refused)


def as_data(
    subject: Subject, findings: list[Finding], passes: Iterable[tuple[Pass, Bound | None]] = ()
) -> dict[str, Any]:
    """One role's plan, ready for JSON."""
    of = subject.serving
    return {
        "role": subject.launch.role.name,
        "layout": str(of.layout) if of else None,
        "serving": {**asdict(of), "layout": str(of.layout)} if of else None,
        "ranks": of.layout.world if of else None,
        "device": {"soc": subject.device.soc, "cann": subject.device.cann and str(subject.device.cann)},
        "format": subject.form,
        "memory": [memory_data(one, of.context if of else 0) for one in subject.memory],
        "kernels": [asdict(use) for use in kernel_uses(subject)],
        "findings": [asdict(finding) for finding in findings],
        "dry_run": [pass_data(done, least) for done, least in passes],
    }


def memory_data(of: Memory, context: int) -> dict[str, Any]:
    """One stage's rank, in bytes."""
    return {
        "stage": of.stage,
        "total": of.total,
        "weights": {block: {"elements": held.elements, "scales": held.scales} for block, held in of.weights.items()},
        "weight_bytes": of.weight_bytes,
        "kv_bytes_per_token": of.kv_per_token,
        "state_bytes_per_slot": of.state_per_slot,
        "state_slots": of.slots,
        "buffers": of.buffers,
        "communicators": of.communicators,
        "activations": of.activations,
        "pools": of.pools,
        "outside_pools": of.outside,
        "tokens": max(0, of.tokens),
        "requests_of_context": of.requests_of(context) if context else None,
        "missing": of.short,
    }


def pass_data(done: Pass, least: Bound | None) -> dict[str, Any]:
    """One pass of the dry run, in operations, bytes and seconds."""
    return {
        "pass": done.name,
        "requests": done.requests,
        "queries": done.queries,
        "context": done.context,
        "launches": done.count.launches,
        "flops": done.count.flops,
        "bytes_moved": done.count.bytes,
        "compulsory_bytes": done.compulsory,
        "weights_read": done.count.weights,
        "cache_rows": done.kv,
        "states": done.states,
        "peak_activations": done.count.peak,
        "bytes_sent": done.sent,
        "collectives": [
            {"op": op, "axis": axis, "ranks": ranks, "count": number, "bytes_sent": sent}
            for (op, axis, ranks), (number, sent) in sorted(collectives(done).items())
        ],
        "kernels": {name: asdict(work) for name, work in done.count.kernels.items()},
        "bound": least and {**asdict(least), "seconds": least.seconds},
    }
