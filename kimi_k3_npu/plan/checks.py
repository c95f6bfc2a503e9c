"""What can be told to go wrong with a launch before it is made. A check is a function from a launch to findings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from kimi_k3_npu.config import MXFP4_GROUP, KimiK3Config
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.ops.device import Device, parse_cann
from kimi_k3_npu.ops.experts import Mxfp4Visit, moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.experts_int4 import Int4Visit, moe_experts_int4_group, moe_experts_w4a8
from kimi_k3_npu.ops.grouped import Visit
from kimi_k3_npu.ops.limits import SGL_KERNEL_NPU
from kimi_k3_npu.ops.mc2 import Exchange, refuse_mc2
from kimi_k3_npu.ops.op import Choice
from kimi_k3_npu.plan.kernels import LayerKernel, Situation, layer_kernels
from kimi_k3_npu.plan.memory import GIB, MEGABYTE, Memory, memory
from kimi_k3_npu.recipes.engine_flags import EngineFlags
from kimi_k3_npu.recipes.launch import Launch
from kimi_k3_npu.recipes.reader import glossary, near
from kimi_k3_npu.recipes.schema import CheckpointFormat
from kimi_k3_npu.recipes.serving import Serving, runs_own_model, serving
from kimi_k3_npu.recipes.values import Rule, faults, stated_rules

Level = Literal["error", "warning", "note"]

MILLION = 1 << 20
#: Nodes that vLLM-Ascend's page asks for, for a context of a million tokens.
NODES_FOR_A_MILLION = 8
#: Rows of a low-latency dispatch: the default of the variable, and DeepEP's maximum.
DEEPEP_ROWS, DEEPEP_MOST_ROWS = 128, 1024
#: Rounds of a long prefill's dispatch and tokens of one, and the most tokens of all rounds.
ROUNDS, ROUND_TOKENS, ALL_ROUNDS = range(1, 257), range(32, 8193), 131072
#: SGLang's own class sends v-up to a kernel that refuses more than 1024 tokens from this many on.
SGLANG_V_UP_TOKENS = 65536
#: Tokens that a replica's cache is taken to have room for, where kernels ask: 29 GB in K3.
POOL_TOKENS = MILLION


@dataclass(frozen=True)
class Finding:
    """`check` names the check, `fix` says what would help."""

    level: Level
    check: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level} [{self.check}]: {self.text}" + (f"; {self.fix}" if self.fix else "")


@dataclass
class Subject:
    """One process of a launch, and what follows from it. `reserved` are bytes of a die that the engine never sees."""

    launch: Launch
    config: KimiK3Config
    reserved: int = 0
    extra_weights: int = 0
    #: Whether memory is worked out, which takes seconds.
    deep: bool = True
    #: Instead of what the flags say, for a plan without a recipe.
    given: Serving | None = None
    _layout_error: LayoutError | None = field(default=None, init=False)

    @cached_property
    def value_faults(self) -> list[Finding]:
        """Values that cannot be computed with."""
        return list(value_faults(self.launch))

    @cached_property
    def serving(self) -> Serving | None:
        """None when the flags do not make a layout, or there is no model in this process."""
        if not self.launch.role.nodes or self.value_faults:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = self.given or serving(self.launch)
                found.layout.check(self.config.text, expert_group=expert_group(self.form))
        except LayoutError as error:
            self._layout_error = error
            return None
        return found

    @property
    def layout_error(self) -> LayoutError | None:
        _ = self.serving
        return self._layout_error

    @property
    def form(self) -> CheckpointFormat:
        return self.launch.recipe.checkpoint.format

    @property
    def engine(self) -> str:
        return self.launch.recipe.engine.name

    @cached_property
    def device(self) -> Device:
        """The die, with the kernel package that the engines' images bring."""
        hardware = self.launch.recipe.hardware
        if hardware.cann is None:
            return Device("cpu")
        return Device(hardware.soc, parse_cann(hardware.cann), frozenset({SGL_KERNEL_NPU}))

    @cached_property
    def memory(self) -> list[Memory]:
        """Of a rank of each pipeline stage; nothing without device memory."""
        total = self.launch.recipe.hardware.memory_gib_per_die
        if self.serving is None or total is None:
            return []
        return [
            memory(
                self.config,
                self.serving,
                self.form,
                total=int(total * GIB) - self.reserved,
                stage=stage,
                extra_weights=self.extra_weights,
                device=self.device,
            )
            for stage in range(self.serving.layout.pp)
        ]


Check = Callable[[Subject], Iterator[Finding]]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Register a check. They run in the order of this file."""
    CHECKS.append(function)
    return function


def check_launch(subject: Subject) -> list[Finding]:
    """Everything that the checks find. What the recipe itself admits to is a note.

    Where a value cannot be read, no check goes on that would compute with it.
    """
    known = subject.launch.recipe.known_problems
    checks = [flags, values, variables] if subject.value_faults else CHECKS
    return [
        Finding("note", found.check, found.text, f"known: {known[found.check]}") if found.check in known else found
        for one in checks
        for found in one(subject)
    ]


def expert_group(form: CheckpointFormat) -> int:
    """Inputs of an expert that share a scale, and so stay together."""
    return MXFP4_GROUP if form in ("mxfp4", "int4x2") else 1


@check
def flags(subject: Subject) -> Iterator[Finding]:
    """Every flag is one that the engine's parser knows."""
    launch, options = subject.launch, subject.launch.options
    former = glossary()["former"]["flags"][subject.engine]
    for flag in launch.flags:
        if flag in former:
            yield Finding("error", "dead-flag", f"{flag} has gone from {subject.engine}", f"use {former[flag]}")
        elif flag not in options:
            words = f"{options.name} does not know {flag}"
            yield Finding("error", "unknown-flag", words, near(flag, options.names).removeprefix("; "))


@check
def values(subject: Subject) -> Iterator[Finding]:
    """Every flag and variable has a value that its reader takes."""
    yield from subject.value_faults


def value_faults(launch: Launch) -> Iterator[Finding]:
    """The values that cannot be read, or are outside of what they can mean."""
    for flag, setting in launch.flags.items():
        if flag in launch.options:
            yield from _flag_faults(launch.options, flag, setting.value)
    for name, setting in launch.environment.items():
        rules = {key: Rule(kind or "text", range_) for key, (kind, range_) in stated_rules("variables").items()}
        for words in faults(name, setting.value, rules):
            yield Finding("error", "variable-value", words)


def _flag_faults(options: EngineFlags, flag: str, value: Any) -> Iterator[Finding]:
    takes = options.takes(flag)
    if (takes == "switch") != (value is True):
        rule = "takes no value" if takes == "switch" else "needs a value"
        yield Finding("error", "flag-value", f"{flag} {rule}", "see --help of the engine")
    elif takes != "switch":
        for words in options.faults(flag, value):
            fix = near(str(value), options.choices(flag)).removeprefix("; ")
            yield Finding("error", "flag-value", words, fix)


@check
def variables(subject: Subject) -> Iterator[Finding]:
    """No variable is one that nobody reads."""
    launch, options = subject.launch, subject.launch.options
    former, known = glossary()["former"]["variables"], glossary()["variables"]
    for name in launch.environment:
        if name in former:
            yield from _former_variable(subject, name, former[name])
        elif _belongs_to(subject.engine, name) and name not in options.variables:
            words = f"{name} does not occur in {options.name}: nobody reads it"
            yield Finding("warning", "dead-variable", words, near(name, options.variables).removeprefix("; "))
        elif name.startswith(("HCCL_", "ASCEND_", "DEEPEP_")) and name not in known:
            words = f"{name} is not a variable that this package knows"
            yield Finding("warning", "unknown-variable", words, near(name, known).removeprefix("; "))


def _former_variable(subject: Subject, name: str, flag: str | None) -> Iterator[Finding]:
    release = subject.launch.recipe.engine.flags
    if flag is None:
        yield Finding("warning", "dead-variable", f"{name} is not read by {release}", "leave it out")
    elif flag in subject.launch.flags:
        yield Finding(
            "warning", "dead-variable", f"{name} is not read by {release}", f"{flag} does it; leave {name} out"
        )
    elif runs_own_model(subject.launch):
        yield Finding(
            "warning", "dead-variable", f"{name} is a former name, which only this package reads", f"use {flag}"
        )
    else:
        yield Finding("error", "dead-variable", f"{name} is not read by {release}, so nothing is split", f"use {flag}")


def _belongs_to(engine: str, name: str) -> bool:
    if engine == "sglang":
        return name.startswith(("SGLANG_", "SGL_"))
    return name.startswith("VLLM_") and not name.startswith("VLLM_ASCEND_")


@check
def layout(subject: Subject) -> Iterator[Finding]:
    """The flags make a layout that can split this model, and every option has an effect."""
    if subject.layout_error:
        text = str(subject.layout_error)
        ignored = "need an all-to-all dispatch" in text
        fix = "use --moe-a2a-backend deepep, or leave the option out" if ignored else ""
        yield Finding("error", "option-ignored" if ignored else "layout", text, fix)
    elif subject.serving and subject.engine == "sglang":
        for note in subject.serving.layout.notes():
            yield Finding("warning", "option-ignored", note, "leave the option out")


@check
def devices(subject: Subject) -> Iterator[Finding]:
    """The ranks are as many as the role's dies."""
    if subject.serving:
        dies = subject.launch.role.nodes * subject.launch.recipe.hardware.dies_per_node
        ranks = subject.serving.layout.world
        if ranks != dies:
            words = f"the flags make {ranks} ranks, {subject.launch.role.name} has {dies} dies"
            yield Finding("error", "devices", words, "change the sizes of the layout, or the number of nodes")


@check
def experts(subject: Subject) -> Iterator[Finding]:
    """The experts of a rank suit the kernels."""
    if not subject.serving or subject.device.soc == "cpu":
        return
    held = subject.config.text.num_experts // subject.serving.layout.ep
    if held == 1:
        words = "one expert a rank: npu_grouped_matmul takes counts of at least two groups"
        yield Finding("error", "experts-per-rank", words, "use a smaller ep")
    if subject.launch.flag("--moe-a2a-backend") == "ascend_fuseep":
        if not runs_own_model(subject.launch):
            words = "ascend_fuseep does not pass SiTU's betas, so experts compute another function"
            yield Finding("error", "expert-function", words, "use --moe-a2a-backend deepep")
        if held % 8:
            words = f"{held} experts a rank: garbled output was reported for counts that are no multiple of 8"
            yield Finding("warning", "experts-per-rank", words, "use --moe-a2a-backend deepep")


@check
def expert_function(subject: Subject) -> Iterator[Finding]:
    """SGLang's own class computes SwiGLU instead of SiTU in INT4 experts without an all-to-all."""
    if subject.engine != "sglang" or runs_own_model(subject.launch) or not subject.serving:
        return
    if subject.form.startswith("w4a8") and not subject.serving.layout.uses_all_to_all and subject.device.soc != "cpu":
        words = "without an all-to-all SGLang's own model runs W4A8 experts with SwiGLU, not SiTU"
        yield Finding("error", "expert-function", words, "use --model-impl kimi_k3_npu, or --moe-a2a-backend deepep")


@check
def expert_format(subject: Subject) -> Iterator[Finding]:
    """The SoC has kernels for experts in this format."""
    if not subject.serving or subject.device.soc == "cpu":
        return
    choice = expert_choice(subject.config, subject.serving, subject.form, subject.device, tokens=16)
    if choice.name == "composed":
        reason = "; ".join(choice.refused.values())
        fix = (
            "use a W4A8 checkpoint, or convert it: kimi-k3-npu weights convert --to int4x2"
            if subject.form == "mxfp4"
            else "use the published MXFP4 checkpoint"
        )
        yield Finding("error", "format-on-soc", f"{subject.form} experts on {subject.device.soc}: {reason}", fix)


def expert_choice(config: KimiK3Config, of: Serving, form: CheckpointFormat, device: Device, tokens: int) -> Choice:
    """The kernel for a rank's experts, with weights prepared as they are after loading."""
    text, layout = config.text, of.layout
    held, inner = text.num_experts // layout.ep, text.moe_intermediate_size // layout.moe_tp
    pairs = (tokens * text.num_experts_per_token, 1) if layout.uses_all_to_all else (tokens, text.num_experts_per_token)
    visit = Visit(*pairs, held, 0, text.expert_hidden_size, inner, torch.bfloat16, device)
    if form == "mxfp4":
        return moe_experts_mxfp4.choose(Mxfp4Visit(visit, nz=True))
    if form == "int4x2":
        return moe_experts_int4_group.choose(Int4Visit(visit, prepared=True))
    return moe_experts.choose(visit) if form == "bf16" else moe_experts_w4a8.choose(Int4Visit(visit, prepared=True))


@check
def mc2(subject: Subject) -> Iterator[Finding]:
    """Decode steps fit the operators that dispatch and compute at once."""
    of = subject.serving
    if not of or not of.layout.uses_all_to_all or subject.device.soc == "cpu" or not of.requests:
        return
    rows = decode_rows(of)
    if of.layout.moe_dispatch == "mc2" and (
        reason := refuse_mc2(_exchange(subject, of, -(-rows // of.layout.attn_tp)))
    ):
        yield Finding(
            "error", "mc2", f"a decode step does not fit MC2: {reason}", "run fewer requests, or use alltoall"
        )
    if subject.engine == "vllm" and subject.device.soc == "a3":
        # vLLM-Ascend lets MC2 carry the rows that a rank has, all of its replica's unless flashcomm1 deals them out.
        dealt = (subject.launch.flag("--additional-config") or {}).get("enable_flashcomm1")
        own = -(-rows // of.layout.attn_tp) if dealt else rows
        if own > 512:
            words = f"a decode step has {own} rows on a rank, MC2 takes 512: vLLM-Ascend falls back to an all-to-all"
            yield Finding("warning", "mc2", words, "lower --max-num-seqs")


def decode_rows(of: Serving) -> int:
    """Rows of one replica in the largest decode step."""
    return of.requests * of.rows


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


@check
def deepep(subject: Subject) -> Iterator[Finding]:
    """DeepEP has room for the rows of a decode step and of a prefill pass."""
    launch, of = subject.launch, subject.serving
    if not of or launch.flag("--moe-a2a-backend") != "deepep" or subject.device.soc == "cpu":
        return
    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    room, rows = int(launch.variable(name, str(DEEPEP_ROWS)) or DEEPEP_ROWS), decode_rows(of)
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


@check
def passes(subject: Subject) -> Iterator[Finding]:
    """The sizes of the passes suit the kernels: none is refused for its size."""
    of = subject.serving
    if not of or subject.device.soc == "cpu":
        return
    if subject.engine == "sglang" and not runs_own_model(subject.launch) and of.chunk >= SGLANG_V_UP_TOKENS:
        words = f"a prefill pass of {of.chunk} tokens: SGLang's own model then calls a kernel that raises beyond 1024"
        yield Finding("error", "chunk", words, "lower --chunked-prefill-size, or use --model-impl kimi_k3_npu")
    for row in refused_for_size(subject.config, of, subject.device):
        words = f"{row.op} of {row.tokens} tokens falls back to {row.kernel}: {'; '.join(row.refused.values())}"
        yield Finding("warning", "kernels", words, "make the pass smaller")


def refused_for_size(config: KimiK3Config, of: Serving, device: Device) -> list[LayerKernel]:
    """The operators that a smaller pass would run on another kernel."""
    found = []
    for tokens, phase in ((of.chunk, "prefill"), (decode_rows(of), "decode")):
        if tokens:
            one = {(row.block, row.op, row.phase, row.shape): row.kernel for row in _kernels(config, of, device, 1)}
            for row in _kernels(config, of, device, tokens):
                small = one.get((row.block, row.op, row.phase, row.shape), row.kernel)
                if row.phase in ("any", phase) and row.kernel not in (small, None):
                    found.append(row)
    return found


def _kernels(config: KimiK3Config, of: Serving, device: Device, tokens: int) -> list[LayerKernel]:
    context = max(1, min(of.context, POOL_TOKENS // tokens))
    return layer_kernels(config.text, Situation(tokens, of.layout, device, context=context))


@check
def graphs(subject: Subject) -> Iterator[Finding]:
    """The largest decode step has a graph."""
    of = subject.serving
    if of and of.graph_batches and of.phase != "prefill" and max(of.graph_batches) < of.requests:
        words = f"{of.requests} requests a replica, graphs up to {max(of.graph_batches)}: larger steps run without"
        yield Finding("warning", "graphs", words, "add the size to the graph batches")


@check
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
    from kimi_k3_npu.plan.search import nearest

    found = nearest(subject)
    return f"nearest layout that fits: {found}" if found else "no layout over these dies fits; use more nodes"


@check
def million(subject: Subject) -> Iterator[Finding]:
    """A context of a million tokens has the nodes that it was shown with."""
    asked = subject.launch.flag("--max-model-len") or subject.launch.flag("--context-length") or 0
    if int(asked) >= MILLION and subject.launch.role.nodes < NODES_FOR_A_MILLION:
        words = f"{asked} tokens of context on {subject.launch.role.nodes} nodes"
        yield Finding("error", "context-nodes", words, f"vLLM-Ascend's page asks for {NODES_FOR_A_MILLION} nodes")


@check
def aiv(subject: Subject) -> Iterator[Finding]:
    """A2 cannot expand collectives on the vector cores."""
    if subject.device.soc == "a2" and subject.launch.variable("HCCL_OP_EXPANSION_MODE") == "AIV":
        yield Finding("error", "aiv", "HCCL_OP_EXPANSION_MODE=AIV must not be set on A2", "leave it out")


@check
def verification(subject: Subject) -> Iterator[Finding]:
    """Drafts are verified by kernels that the NPU has."""
    launch = subject.launch
    if subject.engine != "sglang" or subject.device.soc == "cpu" or not launch.flag("--speculative-algorithm"):
        return
    if launch.flag("--linear-attn-verify-backend") != "triton":
        words = "SGLang verifies drafts of K3 with NVIDIA's kernels unless told otherwise"
        yield Finding("error", "verify-backend", words, "use --linear-attn-verify-backend triton")


@check
def draft(subject: Subject) -> Iterator[Finding]:
    """What is not counted is said."""
    speculates = subject.launch.flag("--speculative-algorithm") or subject.launch.flag("--speculative-config")
    if subject.serving and speculates and not subject.extra_weights:
        yield Finding("note", "draft", "the draft's weights and cache are not counted", "give --draft-gb")


@check
def transfer(subject: Subject) -> Iterator[Finding]:
    """Prefill and decode agree on what travels between them."""
    launch, config = subject.launch, subject.launch.flag("--kv-transfer-config")
    if not isinstance(config, dict):
        return
    for connector in config.get("kv_connector_extra_config", {}).get("connectors", [config]):
        port = connector.get("kv_port", "")
        lowest = 20000 + 1000 * launch.recipe.hardware.dies_per_node
        if not isinstance(port, str) or not port.isdecimal():
            yield Finding("error", "transfer", f"kv_port is {port!r}, must be a number in quotes", 'such as "36000"')
        elif int(port) < lowest:
            words = f"kv_port {port}: direct transport takes the ports up to {lowest}"
            yield Finding("error", "transfer", words, f"use {lowest} or higher")
        yield from _sizes(subject, connector.get("kv_connector_extra_config", {}))
    others = [role for role in launch.recipe.serving_roles if role.name != launch.role.name]
    for flag in ("--mamba-cache-mode", "--speculative-config", "--tensor-parallel-size"):
        for other in others:
            theirs = other.flags[flag].value if flag in other.flags else None
            ours = launch.role.flags[flag].value if flag in launch.role.flags else None
            if theirs != ours:
                words = f"{flag} is {ours} here and {theirs} in {other.name}"
                yield Finding("error", "transfer", words, "make them equal")


def _sizes(subject: Subject, stated: dict[str, Any]) -> Iterator[Finding]:
    for role in subject.launch.recipe.serving_roles:
        sizes = {"dp_size": "--data-parallel-size", "tp_size": "--tensor-parallel-size"}
        real = {name: role.flags[flag].value if flag in role.flags else 1 for name, flag in sizes.items()}
        if stated.get(role.name, real) != real:
            words = f"--kv-transfer-config says {role.name} has {stated[role.name]}, it has {real}"
            yield Finding("error", "transfer", words, "state the real sizes")
