"""Which NPU kernels the layers of a model take, by the same pure functions that choose when they run.

Letters: T tokens of each data-parallel replica, R rows that one rank's MLP or experts see, h heads of this rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from kimi_k3_npu.config import KimiK3Config, TextConfig
from kimi_k3_npu.ops.attention import PAGE, Expanded, Latent, causal_attention, latent_attention
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.experts import Mxfp4Visit, moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.experts_int4 import Int4Visit, moe_experts_int4_group, moe_experts_w4a8
from kimi_k3_npu.ops.grouped import Visit
from kimi_k3_npu.ops.kda import Gate, kda_gate
from kimi_k3_npu.ops.kda_chunk import Chunked, kda_chunk
from kimi_k3_npu.ops.mc2 import Exchange, communicator_buffer, refuse_mc2
from kimi_k3_npu.ops.norm import Norm, rms_norm
from kimi_k3_npu.ops.op import Choice
from kimi_k3_npu.ops.q_absorb import q_absorb
from kimi_k3_npu.ops.quant_linear import Linear, w8a8_linear
from kimi_k3_npu.ops.residual import Mix, mix_residuals
from kimi_k3_npu.ops.routing import Routing, route
from kimi_k3_npu.ops.situ import Situ, situ_and_mul
from kimi_k3_npu.ops.v_up import Bmm, v_up
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.resources import resource_path

#: The part of the network that has the operator, in the order of a table.
Block = Literal["every layer", "KDA", "MLA", "MoE", "dense MLP"]
#: Decode: T sequences of one token each. Prefill: one new sequence of T tokens. Any: the operator sees only T tokens.
Phase = Literal["any", "decode", "prefill"]


@dataclass(frozen=True)
class LayerKernel:
    """The kernel of one operator for one number of tokens; None when there are none, and nothing is launched.

    `shape` is in words; `refused` has the kernels that come before, with the reason against each.
    """

    block: Block
    op: str
    phase: Phase
    tokens: int
    shape: str
    kernel: str | None
    refused: Mapping[str, str]


@dataclass(frozen=True)
class Situation:
    """What the choices depend on beside the model; `tokens` is of each data-parallel replica."""

    tokens: int
    layout: ParallelLayout
    device: Device
    dtype: torch.dtype = torch.bfloat16
    #: Tokens that each sequence has in the cache in a decode step, its new one included.
    context: int = 4096

    @property
    def all_replicas(self) -> int:
        return self.tokens * self.layout.dp

    @property
    def own(self) -> int:
        """Rows whose experts this rank looks up: its share with an all-to-all, else everyone's."""
        return -(-self.tokens // self.layout.attn_tp) if self.layout.uses_all_to_all else self.all_replicas


def published_config() -> KimiK3Config:
    """The configuration of the full-size Kimi-K3, which comes with this package."""
    file = resource_path("weights", "manifests", "kimi-k3-config.json")
    return KimiK3Config.from_hf(json.loads(file.read_text(encoding="utf-8")))


def layer_kernels(config: TextConfig, now: Situation) -> list[LayerKernel]:
    """The kernel of every operator that has a choice and is the same however weights are stored (see `weight_kernels`).

    Raises:
        LayoutError: The layout cannot split this model.
        LaunchError: A kernel is forced (KIMI_K3_NPU_V_UP) that cannot be used here.
    """
    now.layout.check(config)
    kernels = [*_every_layer(config, now)]
    if config.kda_layers:
        kernels += _kda(config, now)
    if config.mla_layers:
        kernels += _mla(config, now)
    if config.moe_layers:
        kernels += _moe(config, now)
    if len(config.moe_layers) < config.num_hidden_layers:
        rows = now.tokens if now.layout.enable_dense_mlp_attn_tp else now.all_replicas
        kernels += _activation(
            "dense MLP", config, config.intermediate_size // now.layout.axis("dense", 0).size, rows, now
        )
    return kernels


def weight_kernels(config: TextConfig, now: Situation) -> list[LayerKernel]:
    """The kernels of routed experts and of int8 linear layers, in each form in which their weights may be stored.

    Weights are taken as prepared after loading.
    """
    kernels: list[LayerKernel] = []
    if config.moe_layers:
        kernels += _experts(config, now)
        shared = config.num_shared_experts * config.moe_intermediate_size // now.layout.shared_ways
        kernels += _int8_mlp("MoE", config, shared, now) if shared else []
    if len(config.moe_layers) < config.num_hidden_layers:
        kernels += _int8_mlp("dense MLP", config, config.intermediate_size // now.layout.axis("dense", 0).size, now)
    return kernels


def _row(block: Block, choice: Choice, now: Situation, shape: str, phase: Phase = "any") -> LayerKernel:
    kernel = choice.name if now.tokens else None
    return LayerKernel(block, choice.op, phase, now.tokens, shape, kernel, choice.refused if kernel else {})


def _norm(block: Block, now: Situation, *shape: int, fp32: bool = False) -> LayerKernel:
    dtype = torch.float32 if fp32 else now.dtype
    choice = rms_norm.choose(Norm(shape, dtype, dtype, now.device))
    return _row(block, choice, now, f"[T, {', '.join(map(str, shape[1:]))}]" + " fp32" * fp32)


def _every_layer(config: TextConfig, now: Situation) -> Iterator[LayerKernel]:
    yield _norm("every layer", now, now.tokens, config.hidden_size)
    if block := config.attn_res_block_size:
        most = -(-config.num_hidden_layers // block)
        case = Mix(now.tokens, most, config.hidden_size, now.dtype, True, now.device)
        yield _row("every layer", mix_residuals.choose(case), now, f"[T, 1..{most} + 1, {config.hidden_size}]")


def _kda(config: TextConfig, now: Situation) -> Iterator[LayerKernel]:
    h, d, T = config.kda_num_heads // now.layout.attn_tp, config.kda_head_dim, now.tokens
    yield _row("KDA", kda_gate.choose(Gate(T, h, d, now.dtype, now.device)), now, f"[T, {h}, {d}]")
    chunked = kda_chunk.choose(Chunked(T, 1, T == 0, h, d, d, now.dtype, now.device))
    yield _row("KDA", chunked, now, f"[T, {h}, {d}], state [{h}, {d}, {d}]", "prefill")
    yield _norm("KDA", now, T, h, d, fp32=True)


def _mla(config: TextConfig, now: Situation) -> Iterator[LayerKernel]:
    h, T = config.num_attention_heads // now.layout.attn_tp, now.tokens
    n, r, v, R = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    if config.q_lora_rank:
        yield _norm("MLA", now, T, config.q_lora_rank)
    yield _norm("MLA", now, T, R)
    absorb = q_absorb.choose(Bmm(T, h, n, R, now.dtype, False, now.device))  # the queries are a view
    yield _row("MLA", absorb, now, f"[T, {h}, {n}] x [{h}, {n}, {R}]")
    capacity = -(-now.context // PAGE) * PAGE
    latent = Latent(T, h, (R, r), T, capacity, now.dtype, now.dtype, True, now.device)
    yield _row("MLA", latent_attention.choose(latent), now, f"[T, {h}, {R} + {r}] over {now.context} rows", "decode")
    up = v_up.choose(Bmm(T, h, R, v, now.dtype, True, now.device))
    yield _row("MLA", up, now, f"[T, {h}, {R}] x [{h}, {R}, {v}]")
    expanded = causal_attention.choose(Expanded(T, T, 1, h, (n + r, v), now.dtype, now.device))
    yield _row("MLA", expanded, now, f"[T, {h}, {n + r}], values [T, {h}, {v}]", "prefill")


def _moe(config: TextConfig, now: Situation) -> Iterator[LayerKernel]:
    experts, k = config.num_experts, config.num_experts_per_token
    groups, sigmoid = (config.num_expert_group, config.topk_group), config.moe_router_activation_func == "sigmoid"
    routing = Routing(now.own, experts, k, *groups, config.moe_renormalize, sigmoid, torch.float32, now.device)
    yield _row("MoE", route.choose(routing), now, f"[R, {experts}] fp32, top {k}")
    if now.layout.moe_dispatch == "mc2":
        yield _dispatch(config, now)
    if config.routed_expert_hidden_size and config.latent_moe_use_norm:
        rows = now.own if now.layout.uses_all_to_all else now.tokens
        yield _norm("MoE", now, rows, config.routed_expert_hidden_size)
    if config.num_shared_experts:
        ways = now.layout.shared_ways
        rows = now.own * ways if now.layout.uses_all_to_all else now.all_replicas
        yield from _activation(
            "MoE", config, config.num_shared_experts * config.moe_intermediate_size // ways, rows, now
        )


def _dispatch(config: TextConfig, now: Situation) -> LayerKernel:
    """As `parallel.experts.Mc2` chooses."""
    case = Exchange(
        ranks=now.layout.ep,
        experts=config.num_experts,
        rows=now.own,
        hidden=config.expert_hidden_size,
        top_k=config.num_experts_per_token,
        dtype=now.dtype,
        buffer=communicator_buffer(),
        device=now.device,
    )
    reason = refuse_mc2(case) if now.tokens else None
    kernel = None if not now.tokens else "alltoall" if reason else "mc2"
    shape = f"[R, {case.hidden}] over {case.ranks} ranks"
    return LayerKernel("MoE", "moe_dispatch", "any", now.tokens, shape, kernel, {"mc2": reason} if reason else {})


def _activation(block: Block, config: TextConfig, width: int, rows: int, now: Situation) -> Iterator[LayerKernel]:
    """SiTU of an MLP, `width` of it on this rank. SiLU has no kernel of its own."""
    if config.activation_betas[0] is not None:
        yield _row(block, situ_and_mul.choose(Situ(rows, now.dtype, now.device)), now, f"[R, 2 x {width}]")


def _experts(config: TextConfig, now: Situation) -> Iterator[LayerKernel]:
    k, held = config.num_experts_per_token, config.num_experts // now.layout.ep
    inner, width = config.moe_intermediate_size // now.layout.moe_tp, config.expert_hidden_size
    # Rows that an all-to-all has brought are for one expert each.
    pairs = (now.own * k, 1) if now.layout.uses_all_to_all else (now.own, k)
    visit = Visit(*pairs, held, 0, width, inner, now.dtype, now.device)
    choices = (
        moe_experts.choose(visit),
        moe_experts_mxfp4.choose(Mxfp4Visit(visit, nz=True)),
        moe_experts_w4a8.choose(Int4Visit(visit, prepared=True)),
        moe_experts_int4_group.choose(Int4Visit(visit, prepared=True)),
    )
    for choice in choices:
        yield _row("MoE", choice, now, f"[R, {width}] to {held} experts of {inner}")


def _int8_mlp(block: Block, config: TextConfig, width: int, now: Situation) -> Iterator[LayerKernel]:
    """The two linear layers of an MLP, `width` of it on this rank."""
    for inputs, outputs in ((config.hidden_size, 2 * width), (width, config.hidden_size)):
        case = Linear(now.own, inputs, outputs, now.dtype, torch.float32, now.device)
        yield _row(block, w8a8_linear.choose(case), now, f"[R, {inputs}] x [{inputs}, {outputs}] int8")
