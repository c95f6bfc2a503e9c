"""What one rank's memory holds during a launch, and how many tokens and requests that leaves room for.

Every number comes from the code that runs: weights from the shard records, cache rows and states from the pools of
`ModelCache`, activations from a pass of the real modules over the layers where most is live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from kimi_k3_npu.config import KimiK3Config, TextConfig
from kimi_k3_npu.model.cache import PAGE, ModelCache
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.parallel.layout import AxisName, ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.plan.choices import Situation, layer_kernels
from kimi_k3_npu.plan.dry_run import Rank
from kimi_k3_npu.plan.formats import Held, expert_group, held_blocks
from kimi_k3_npu.plan.weights import BLOCKS, Block
from kimi_k3_npu.recipes.schema import CheckpointFormat
from kimi_k3_npu.recipes.serving import Serving

GIB = 1 << 30
MEGABYTE = 1 << 20
#: A communicator takes its buffer once for sending and once for receiving (CANN, HCCL_BUFFSIZE).
BUFFERS_OF_A_COMMUNICATOR = 2


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One rank of a role, in bytes.

    Args:
        total: The die's memory, less what the user says is reserved.
        weights: By block.
        kv_per_token: Cache rows of one token of one request, in this rank's layers.
        state_per_slot: KDA states and windows of one slot, in this rank's layers.
        buffers: HCCL's, of every communicator that the layout makes.
        activations: Of the largest pass; 0, as the buffers are, where not even the weights fit.
        pools: What the engine leaves for cache rows and states.
        outside: What the engine leaves for everything else, where it tells the two apart; None where it does not.
    """

    stage: int
    total: int
    weights: dict[Block, Held]
    kv_per_token: int
    state_per_slot: int
    buffers: int
    communicators: int
    activations: int
    pools: int
    outside: int | None
    requests: int
    slots_per_request: int
    state_slots: int | None

    @property
    def weight_bytes(self) -> int:
        return sum(held.total for held in self.weights.values())

    @property
    def slots(self) -> int:
        """State slots of a replica."""
        return self.state_slots if self.state_slots is not None else self.requests * self.slots_per_request

    @property
    def states(self) -> int:
        return self.slots * self.state_per_slot

    @property
    def tokens(self) -> int:
        """Tokens that a replica's cache has room for beside its states; negative when even the states do not fit."""
        left = self.pools - self.states
        return left // self.kv_per_token if self.kv_per_token else (1 << 62 if left >= 0 else -1)

    def requests_of(self, context: int) -> int:
        """Requests of `context` tokens that a replica has room for."""
        each = context * self.kv_per_token + self.slots_per_request * self.state_per_slot
        return max(0, self.pools) // each if each else 0

    @property
    def short(self) -> int:
        """Bytes that are missing: for the weights and a single request of a page, or for what is outside the pools."""
        inside = max(0, self.slots_per_request * self.state_per_slot + PAGE * self.kv_per_token - self.pools)
        beside = 0 if self.outside is None else max(0, self.buffers + self.activations - self.outside)
        return max(inside, beside)


def memory(
    config: KimiK3Config,
    serving: Serving,
    form: CheckpointFormat,
    *,
    total: int,
    stage: int = 0,
    extra_weights: int = 0,
    device: Device | None = None,
    need: Need | None = None,
) -> Memory:
    """The memory of a rank of `stage` in a launch. All ranks of a stage have the same.

    Args:
        total: Bytes of a die that the engine sees.
        extra_weights: Of a draft model, which this package does not know.
        device: Whose fused kernels the activations assume; None assumes none.
        need: Of the largest pass, if already known.

    Raises:
        LayoutError: The layout cannot split this model.
    """
    layout = serving.layout
    layout.check(config.text, expert_group=expert_group(form))
    rank = Rank(config, layout, form, stage * layout.tp, serving.vision, serving.own_model)
    found = held_blocks(rank.held, config.text)
    blocks = {block: found[block] for block in BLOCKS if block in found}
    if extra_weights:
        blocks["draft"] = Held(extra_weights)  # type: ignore[index]
    kv, state = cache_bytes(config, rank.mesh)
    weights = sum(held.total for held in blocks.values())
    static = int(total * serving.memory_fraction)
    if need is None:  # which takes longer than all else, and is of no use where not even the weights fit
        largest = max(serving.chunk, serving.decode_rows)
        need = pass_need(rank, largest, device) if weights < static else Need(0, frozenset())
    communicators = len(need.groups) + (layout.moe_dispatch == "mc2")  # MC2's carries nothing else
    buffers = communicators * BUFFERS_OF_A_COMMUNICATOR * serving.buffer_mb * MEGABYTE
    inside = buffers + need.activations if serving.fraction_covers_all else 0
    return Memory(
        stage=stage,
        total=total,
        weights=blocks,
        kv_per_token=kv,
        state_per_slot=state,
        buffers=buffers,
        communicators=communicators,
        activations=need.activations,
        pools=static - weights - inside,
        outside=None if serving.fraction_covers_all else total - static,
        requests=serving.requests,
        slots_per_request=serving.slots_per_request,
        state_slots=serving.state_slots,
    )


def cache_bytes(config: KimiK3Config, mesh: Mesh, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int]:
    """Bytes of one token's cache rows and of one slot's states, in the layers of the mesh's stage."""
    text = config.text
    cache = ModelCache(text, 1, PAGE, dtype=dtype, device="meta", attn_tp=mesh.attn_tp)
    layers = mesh.layout.stage_layers(mesh.stage, text)
    rows = sum(pool.nbytes for layer in text.mla_layers if layer in layers for pool in cache.mla_pools(layer))
    states = sum(pool.nbytes for layer in text.kda_layers if layer in layers for pool in cache.kda_pools(layer))
    return rows // cache.capacity, states


@dataclass(frozen=True)
class Need:
    """What the largest pass needs beside weights and caches: bytes live at once, and the groups that communicate."""

    activations: int
    groups: frozenset[tuple[int, ...]]


def pass_need(rank: Rank, tokens: int, device: Device | None = None) -> Need:
    """Measured while `tokens` tokens of one replica, a new sequence, pass through the layers of a rank's stage.

    The bank of the residuals only grows, so the last layer of each kind shows the most. On `device`, operators with a
    fused kernel keep their intermediate results on the chip; without one (None) everything is as in the reference.
    """
    text, layout, tokens = rank.config.text, rank.layout, max(1, tokens)
    most, used = rank.peak(tokens, fused_operators(text, layout, tokens, device))
    axes = {_AXES.get(axis, axis) for axis in used} | {"vocab"}
    groups = {layout.axis(axis, 0).members for axis in get_args(AxisName) if axis in axes}
    if layout.pp > 1:
        groups.add(tuple(range(0, layout.world, layout.tp)))
    return Need(most, frozenset(members for members in groups if len(members) > 1))


_AXES = {"shared_experts_tp": "shared", "dense_mlp_tp": "dense", "mc2": "ep"}


def fused_operators(text: TextConfig, layout: ParallelLayout, tokens: int, device: Device | None) -> frozenset[str]:
    """The operators that run as one kernel on `device` for that many tokens."""
    if device is None or device.soc == "cpu":
        return frozenset()
    rows = layer_kernels(text, Situation(max(1, tokens), layout, device))
    composed = {row.op for row in rows if row.kernel == "composed" and row.phase != "decode"}
    return frozenset({row.op for row in rows} - composed)
