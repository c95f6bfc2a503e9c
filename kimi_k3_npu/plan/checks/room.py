"""Checks of memory: what a launch asks for, and what a die has."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3_npu.plan.finding import Finding, Level
from kimi_k3_npu.plan.memory import Memory
from kimi_k3_npu.plan.search import nearest
from kimi_k3_npu.plan.subject import Subject

MILLION = 1 << 20
#: Nodes that vLLM-Ascend's page asks for, for a context of a million tokens.
NODES_FOR_A_MILLION = 8


def fit(subject: Subject) -> Iterator[Finding]:
    """Weights, caches, activations and buffers fit; and as many requests as asked for."""
    of = subject.serving
    if not of or not subject.deep:
        return
    for memory_ in subject.memory:
        if memory_.short:
            yield Finding("error", "memory", _shortage(memory_), _nearest(subject))
            return
    if not subject.memory:
        return
    least = min(subject.memory, key=lambda one: one.tokens)
    slots = least.state_slots
    if slots is not None and slots // least.slots_per_request < of.requests:
        words = (
            f"{slots} state slots of a replica hold {slots // least.slots_per_request} requests of "
            f"{least.slots_per_request} slots, not {of.requests}"
        )
        yield Finding("warning", "state-slots", words, "raise --max-mamba-cache-size, or use --disable-radix-cache")
    if of.phase != "decode" and least.tokens < of.chunk:
        words = f"{least.slots} state slots leave {max(0, least.tokens)} tokens of cache, a pass has {of.chunk}"
        yield Finding("warning", "cache", words, "run fewer requests at a time, or raise the memory fraction")
    if not least.requests_of(of.context):
        explicit = subject.launch.flag("--max-model-len") or subject.launch.flag("--context-length")
        words = f"one request of {of.context} tokens does not fit; without other requests' states {_alone(least)} do"
        level: Level = "note" if not explicit else "error" if subject.engine == "vllm" else "warning"
        yield Finding(level, "context", words, "lower the longest request" if explicit else "give --context-length")


def _alone(of: Memory) -> int:
    """Tokens of a request that has a replica to itself."""
    return max(0, (of.pools - of.slots_per_request * of.state_per_slot) // of.kv_per_token)


def _shortage(of: Memory) -> str:
    sizes = {"weights": of.weight_bytes, "buffers": of.buffers, "activations": of.activations, "pools": of.pools}
    parts = [f"{name} {size / 1e9:.1f}" for name, size in sizes.items() if size]
    return f"{of.short / 1e9:.1f} GB a die do not fit ({', '.join(parts)} of {of.total / 1e9:.1f} GB)"


def _nearest(subject: Subject) -> str:
    found = nearest(subject)
    return f"nearest layout that fits: {found}" if found else "no layout over these dies fits; use more nodes"


def million(subject: Subject) -> Iterator[Finding]:
    """A context of a million tokens has the nodes that it was shown with."""
    asked = subject.launch.flag("--max-model-len") or subject.launch.flag("--context-length") or 0
    if int(asked) >= MILLION and subject.launch.role.nodes < NODES_FOR_A_MILLION:
        words = f"{asked} tokens of context on {subject.launch.role.nodes} nodes"
        yield Finding("error", "context-nodes", words, f"vLLM-Ascend's page asks for {NODES_FOR_A_MILLION} nodes")


def draft(subject: Subject) -> Iterator[Finding]:
    """What is not counted is said."""
    speculates = subject.launch.flag("--speculative-algorithm") or subject.launch.flag("--speculative-config")
    if subject.serving and speculates and not subject.extra_weights:
        yield Finding("note", "draft", "the draft's weights and cache are not counted", "give --draft-gb")
