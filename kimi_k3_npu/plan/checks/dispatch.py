"""Checks of what carries rows to their experts: MC2's operators and DeepEP."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_k3_npu.ops.mc2 import LIMITS, MC2, Exchange
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.memory import MEGABYTE
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.launch import Launch
from kimi_k3_npu.recipes.serving import Serving

#: Rows of a low-latency dispatch: the default of the variable, and DeepEP's maximum.
DEEPEP_ROWS, DEEPEP_MOST_ROWS = 128, 1024
#: Rounds of a long prefill's dispatch and tokens of one, and the most tokens of all rounds.
ROUNDS, ROUND_TOKENS, ALL_ROUNDS = range(1, 257), range(32, 8193), 131072


def mc2(subject: Subject) -> Iterator[Finding]:
    """Decode steps fit the operators that dispatch and compute at once."""
    of = subject.serving
    if not of or not of.layout.uses_all_to_all or subject.device.soc == "cpu" or not of.requests:
        return
    rows, own = of.decode_rows, max(Group("attn_tp", size=of.layout.attn_tp).chunks(of.decode_rows))
    if of.layout.moe_dispatch == "mc2" and (reason := MC2.refuse(_exchange(subject, of, own))):
        yield Finding(
            "error", "mc2", f"a decode step does not fit MC2: {reason}", "run fewer requests, or use alltoall"
        )
    if subject.engine == "vllm" and subject.device.soc == "a3":
        # vLLM-Ascend lets MC2 carry the rows that a rank has, all of its replica's unless flashcomm1 deals them out.
        dealt = (subject.launch.flag("--additional-config") or {}).get("enable_flashcomm1")
        own = own if dealt else rows
        if own > (most := LIMITS["a3"].rows):
            words = f"a decode step has {own} rows on a rank, MC2 takes {most}: vLLM-Ascend falls back to an all-to-all"
            yield Finding("warning", "mc2", words, "lower --max-num-seqs")


def _exchange(subject: Subject, of: Serving, rows: int) -> Exchange:
    text = subject.config.text
    return Exchange(
        ranks=of.layout.ep,
        experts=text.num_experts,
        rows=rows,
        hidden=text.expert_hidden_size,
        top_k=text.num_experts_per_token,
        dtype=torch.bfloat16,
        buffer=of.buffer_mb * MEGABYTE,
        device=subject.device,
    )


def deepep(subject: Subject) -> Iterator[Finding]:
    """DeepEP has room for the rows of a decode step and of a prefill pass."""
    launch, of = subject.launch, subject.serving
    if not of or launch.flag("--moe-a2a-backend") != "deepep" or subject.device.soc == "cpu":
        return
    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    room, rows = int(launch.variable(name, str(DEEPEP_ROWS)) or DEEPEP_ROWS), of.decode_rows
    if room > DEEPEP_MOST_ROWS:
        yield Finding("error", "deepep-capacity", f"{name}={room}, at most {DEEPEP_MOST_ROWS}", "lower it")
    if of.phase != "prefill" and rows > room:
        words = f"{of.requests} requests x {of.rows} rows = {rows} in a decode step, {name} has room for {room}"
        fix = f"set {name}={rows}" if rows <= DEEPEP_MOST_ROWS else "lower --max-running-requests"
        yield Finding("error", "deepep-capacity", words, fix)
    yield from _rounds(launch, of)


def _rounds(launch: Launch, of: Serving) -> Iterator[Finding]:
    names = ("DEEPEP_NORMAL_LONG_SEQ_ROUND", "DEEPEP_NORMAL_LONG_SEQ_PER_ROUND_TOKENS")
    if not all(name in launch.environment for name in names):
        return
    rounds, tokens = (int(launch.variable(name) or 0) for name in names)
    for name, value, allowed in ((names[0], rounds, ROUNDS), (names[1], tokens, ROUND_TOKENS)):
        if value not in allowed:
            words = f"{name}={value} is outside {allowed[0]}..{allowed[-1]}"
            yield Finding("error", "deepep-rounds", words, "change it")
    if rounds * tokens > ALL_ROUNDS:
        words = f"{rounds} rounds x {tokens} tokens = {rounds * tokens}, at most {ALL_ROUNDS}"
        yield Finding("error", "deepep-rounds", words, f"lower {names[0]}")
    elif of.chunk > rounds * tokens:
        words = f"a prefill pass of {of.chunk} tokens a replica needs more than {rounds} rounds of {tokens}"
        yield Finding("error", "deepep-rounds", words, f"raise {names[0]}, or lower --chunked-prefill-size")
