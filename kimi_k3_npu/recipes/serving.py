"""What an engine's flags ask of the model, in the terms of this package: the layout, and the sizes of its passes.

SGLang counts tokens and requests of all replicas together, vLLM those of one; here everything is of one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kimi_k3_npu.parallel.layout import Dispatch, ParallelLayout
from kimi_k3_npu.recipes.launch import Launch

Phase = Literal["both", "prefill", "decode"]

#: State slots that SGLang keeps for a request, by --mamba-radix-cache-strategy; "auto" is extra_buffer where it can be.
STATE_SLOTS = {"auto": 5, "extra_buffer": 5, "extra_buffer_lazy": 4, "no_buffer": 3}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """One role's passes. Tokens and requests are of one attention replica."""

    layout: ParallelLayout
    phase: Phase
    #: Largest prefill pass, in tokens; 0 where there is no prefill.
    chunk: int
    #: Requests at a time.
    requests: int
    #: Longest request, in tokens.
    context: int
    #: Rows of one request in a decode pass: 1, or the draft block and the token before it.
    rows: int
    #: Batch sizes (in requests) that get a graph; empty without graphs.
    graph_batches: tuple[int, ...]
    #: State slots that the engine keeps for a request, and how many it is told to keep in all (None: as fit).
    slots_per_request: int
    state_slots: int | None
    memory_fraction: float
    #: Whether that fraction is also for activations and communication (vLLM), or weights and pools only (SGLang).
    fraction_covers_all: bool
    #: MB of a communicator's buffer (HCCL_BUFFSIZE).
    buffer_mb: int
    #: Whether the vision tower is loaded.
    vision: bool = True
    #: Whether this package's model runs, and not the engine's own.
    own_model: bool = True

    @property
    def decode_rows(self) -> int:
        """Rows of one replica in the largest decode step."""
        return self.requests * self.rows


def serving(launch: Launch) -> Serving:
    """Raises LayoutError when the flags do not make a layout."""
    return _sglang(launch) if launch.recipe.engine.name == "sglang" else _vllm(launch)


def runs_own_model(launch: Launch) -> bool:
    """Whether the model class is this package's, and not the engine's."""
    return launch.flag("--model-impl") == "kimi_k3_npu"


def _sglang(launch: Launch) -> Serving:
    layout = sglang_layout(launch.flags_plain)
    dp = layout.dp
    mode = launch.flag("--disaggregation-mode")
    phase: Phase = mode if mode in ("prefill", "decode") else "both"
    drafted = int(launch.flag("--speculative-dspark-block-size", 0)) if launch.flag("--speculative-algorithm") else 0
    kept = 1
    if phase != "decode" and not launch.flag("--disable-radix-cache"):
        kept = STATE_SLOTS[str(launch.flag("--mamba-radix-cache-strategy", "auto"))]
    slots = launch.flag("--max-mamba-cache-size")
    context = int(launch.flag("--context-length", 1 << 20))
    chunk = int(launch.flag("--chunked-prefill-size", 8192))
    return Serving(
        layout=layout,
        phase=phase,
        # Nothing above 0: prompts are not cut, and the longest is one pass.
        chunk=0 if phase == "decode" else max(1, chunk // dp) if chunk > 0 else context,
        requests=max(1, int(launch.flag("--max-running-requests", 64)) // dp),
        context=context,
        rows=1 + drafted,
        graph_batches=() if launch.flag("--disable-cuda-graph") else _ints(launch.flag("--cuda-graph-bs-decode", [])),
        # A drafted token's state is kept until it is known whether the token is.
        slots_per_request=kept + (1 + drafted if drafted else 0),
        state_slots=None if slots is None else int(slots) // dp,
        memory_fraction=float(launch.flag("--mem-fraction-static", 0.9)),
        fraction_covers_all=False,
        buffer_mb=int(launch.variable("HCCL_BUFFSIZE", "200") or 200),
        own_model=runs_own_model(launch),
    )


def sglang_layout(flags: Mapping[str, Any]) -> ParallelLayout:
    """The layout for SGLang's flags. Raises LayoutError."""
    tp = int(flags.get("--tp-size", 1))
    dp = int(flags.get("--attn-dp-size", flags.get("--dp-size", 1) if "--enable-dp-attention" in flags else 1))
    all_to_all = flags.get("--moe-a2a-backend", "none") not in ("none", "ascend_tp")
    size = flags.get("--shared-experts-tp-size")
    return ParallelLayout(
        tp=tp,
        dp=dp,
        ep=tp if all_to_all else int(flags.get("--ep-size", 1)),
        pp=int(flags.get("--pp-size", 1)),
        moe_dispatch="alltoall" if all_to_all else "gather",
        enable_shared_experts_attn_tp="--enable-shared-experts-attn-tp" in flags,
        shared_experts_tp_size=None if size is None else int(size),
        enable_dense_mlp_attn_tp="--enable-dense-mlp-attn-tp" in flags,
        enable_dp_lm_head="--enable-dp-lm-head" in flags,
    )


def _vllm(launch: Launch) -> Serving:
    layout = vllm_layout(launch.flags_plain)
    config = launch.flag("--speculative-config", {})
    drafted = int(config.get("num_speculative_tokens", 0)) if isinstance(config, dict) else 0
    kv = launch.flag("--kv-transfer-config", {})
    phase: Phase = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv.get("kv_role", ""), "both")  # type: ignore[assignment]
    requests = int(launch.flag("--max-num-seqs", 256))
    graphs = launch.flag("--compilation-config", {}).get("cudagraph_capture_sizes", [requests])
    return Serving(
        layout=layout,
        phase=phase,
        chunk=0 if phase == "decode" else int(launch.flag("--max-num-batched-tokens", 8192)),
        requests=requests,
        context=int(launch.flag("--max-model-len", 1 << 20)),
        rows=1 + drafted,
        graph_batches=() if launch.flag("--enforce-eager") else _ints(graphs),
        slots_per_request=1 + (1 + drafted if drafted else 0),
        state_slots=None,
        memory_fraction=float(launch.flag("--gpu-memory-utilization", 0.9)),
        fraction_covers_all=True,
        buffer_mb=int(launch.variable("HCCL_BUFFSIZE", "200") or 200),
        vision=not launch.flag("--language-model-only"),
        own_model=runs_own_model(launch),
    )


def vllm_layout(flags: Mapping[str, Any]) -> ParallelLayout:
    """The layout for vLLM's flags: its replicas together are what this package calls tp. Raises LayoutError.

    vLLM splits everything but the routed experts over the ranks of a replica, which is attention TP here.
    """
    dp = int(flags.get("--data-parallel-size", 1))
    tp = dp * int(flags.get("--tensor-parallel-size", 1))
    whole_experts = "--enable-expert-parallel" in flags and tp > 1
    dispatch: Dispatch = "alltoall" if whole_experts else "gather"
    return ParallelLayout(
        tp=tp,
        dp=dp,
        ep=tp if whole_experts else 1,
        pp=int(flags.get("--pipeline-parallel-size", 1)),
        moe_dispatch=dispatch,
        enable_shared_experts_attn_tp=whole_experts,
        enable_dense_mlp_attn_tp=dp > 1,
        enable_dp_lm_head=dp > 1,
    )


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in (values if isinstance(values, list) else [values]))
