"""Which weights each rank of a layout holds, block by block: counted on the real modules, built without memory.

Nothing here knows a weight's shape. Bytes are those of the modules' parameters; whether a tensor is replicated is what
its shard record says. Only the words for a rank's part ("heads 6..11 of 96") are worked out beside the modules, from
the groups that the modules split over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from kimi_k3_npu.checkpoint.load import DTYPES
from kimi_k3_npu.config import KimiK3Config, TextConfig
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import layers

#: In the order in which a token meets them.
Block = Literal[
    "vision",
    "embedding",
    "KDA",
    "MLA",
    "dense MLP",
    "router",
    "latent projections",
    "routed experts",
    "shared experts",
    "norms and mixers",
    "head",
]
BLOCKS: tuple[Block, ...] = get_args(Block)

# The block of a module by where it is: at the top, in a layer, in a layer's feed-forward part.
_TOP: dict[str, Block] = {
    "embed_tokens": "embedding",
    "lm_head": "head",
    "norm": "norms and mixers",
    "output_attn_res": "norms and mixers",
    "vision_tower": "vision",
    "mm_projector": "vision",
}
_LAYER: dict[str, Block] = {
    "input_layernorm": "norms and mixers",
    "post_attention_layernorm": "norms and mixers",
    "self_attention_res": "norms and mixers",
    "mlp_res": "norms and mixers",
}
_MLP: dict[str, Block] = {
    "dense": "dense MLP",
    "gate": "router",
    "experts": "routed experts",
    "shared_experts": "shared experts",
    "routed_expert_down_proj": "latent projections",
    "routed_expert_up_proj": "latent projections",
    "routed_expert_norm": "latent projections",
}


@dataclass(frozen=True)
class Part:
    """A rank's part of something that `ways` ranks along `axis` share: `first` .. `last` of `total`, in `unit`."""

    axis: str
    ways: int
    unit: str
    first: int
    last: int
    total: int

    def __str__(self) -> str:
        if self.last < self.first:
            return f"no {self.unit} of {self.total}, only padding"
        return f"{self.unit} {self.first}..{self.last} of {self.total}"


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one block on one rank, in bytes.

    Args:
        parts: How the block is split; empty when every rank of the stage holds all of it.
        sharded: Of tensors that other ranks hold other parts of, with padding.
        replicated: Of tensors that every rank of the stage holds whole.
        derived: Copies made once from the weights, in a layout that kernels want.
    """

    block: Block
    parts: tuple[Part, ...]
    sharded: int
    replicated: int
    derived: int

    @property
    def total(self) -> int:
        return self.sharded + self.replicated + self.derived


@dataclass(frozen=True)
class RankWeights:
    """What one rank holds: `layers` of the network, and the blocks of which it has any weights."""

    layout: ParallelLayout
    rank: int
    stage: int
    layers: range
    blocks: tuple[BlockWeights, ...]

    @property
    def total(self) -> int:
        return sum(block.total for block in self.blocks)

    def __getitem__(self, block: str) -> BlockWeights:
        """Raises KeyError for a block that this rank has nothing of."""
        for found in self.blocks:
            if found.block == block:
                return found
        raise KeyError(block)


def rank_weights(
    config: KimiK3Config,
    layout: ParallelLayout,
    rank: int = 0,
    *,
    experts: str = "mxfp4",
    dtype: torch.dtype | None = None,
    vision: bool = True,
) -> RankWeights:
    """The weights of global `rank` of `layout`.

    `experts` is the form in which routed experts are kept, `dtype` that of plain weights, but for those that are always
    fp32; None takes the config's.

    Raises:
        LayoutError: The layout cannot split this model, or has no such rank.
    """
    if FORMATS[experts].group > 1 and config.quantization is None:
        raise LayoutError(f"config.json has no quantization_config: its experts are plain, and cannot be {experts}")
    if dtype is None and config.dtype not in DTYPES:
        raise LayoutError(f"config.json: dtype is {config.dtype!r}; supported: {', '.join(DTYPES)}")
    dtype = dtype or DTYPES[config.dtype]
    layout.check(config.text, expert_group=FORMATS[config.quantization or "plain"].group)
    mesh = Mesh.inspect(layout, rank)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, mesh, dtype=dtype, experts=experts, vision=vision)
    sizes = {block: [0, 0, 0] for block in BLOCKS}
    for block, *counted in _count(model, config.text):
        sizes[block] = [a + b for a, b in zip(sizes[block], counted, strict=True)]
    held = [block for block in BLOCKS if any(sizes[block])]
    return RankWeights(
        layout,
        rank,
        mesh.stage,
        layout.stage_layers(mesh.stage, config.text),
        tuple(BlockWeights(block, _parts(block, config.text, mesh), *sizes[block]) for block in held),
    )


def _count(model: nn.Module, text: TextConfig) -> Iterator[tuple[Block, int, int, int]]:
    """(block, sharded, replicated, derived bytes) of every parameter and every buffer."""
    for path, layer in layers(model):
        for name, parameter in layer.named_parameters(recurse=False):
            pieces = layer.pieces(name).values()
            total, size = parameter.numel(), parameter.element_size()
            whole = sum(piece.numel for piece in pieces if piece.is_replicated)
            if all(piece.is_replicated for piece in pieces):
                whole = total  # several published tensors may be folded into one
            yield block_of(path, text), (total - whole) * size, whole * size, 0
    for path, buffer in model.named_buffers():
        yield block_of(path, text), 0, 0, buffer.numel() * buffer.element_size()


def block_of(path: str, text: TextConfig) -> Block:
    """The one of BLOCKS that the module or parameter at the dotted `path` of a model belongs to."""
    top, *inside = path.split(".")
    if top != "layers":
        return _TOP[top]
    layer, part, *inside = inside
    if part == "self_attn":
        return "KDA" if text.layer_kinds[int(layer)] == "kda" else "MLA"
    return _MLP[inside[0]] if part == "mlp" else _LAYER[part]


def _parts(block: Block, text: TextConfig, mesh: Mesh) -> tuple[Part, ...]:
    """How `block` is split, with this rank's part of it."""
    parts: list[Part] = []

    def add(group: Group, unit: str, total: int, held: slice | None = None) -> None:
        held = held or group.part(total, unit)
        if group.size > 1:
            parts.append(Part(_axis(mesh, group), group.size, unit, held.start, held.stop - 1, total))

    match block:
        case "embedding" | "head":
            add(mesh.vocab, "rows", text.vocab_size, mesh.vocab.padded_part(text.vocab_size)[1])
        case "KDA":
            add(mesh.attn_tp, "heads", text.kda_num_heads)
        case "MLA":
            add(mesh.attn_tp, "heads", text.num_attention_heads)
        case "dense MLP":
            add(mesh.dense, "columns", text.intermediate_size)
        case "routed experts":
            add(mesh.ep, "experts", text.num_experts)
            add(mesh.moe_tp, "columns", text.moe_intermediate_size)
        case "shared experts":
            add(mesh.shared, "columns", text.num_shared_experts * text.moe_intermediate_size)
    return tuple(parts)


def _axis(mesh: Mesh, group: Group) -> str:
    """The name of the axis that `group` lies along: of the groups for one block, which of tp and attn_tp they are."""
    if group in (mesh.vocab, mesh.dense, mesh.shared):
        return {mesh.layout.attn_tp: "attn_tp", mesh.layout.tp: "tp"}.get(group.size, group.name)
    return group.name
