"""The one map from published tensor names to parameters.

A row says: this published name fills that piece of that parameter. `{L}` is a 0-based layer, `{E}` an expert, `{B}` a
vision block. Loading, verifying and converting all read these rows; the shapes and the shard of a piece are with the
parameter (`parallel/shard.py`). Published aliases are undone in `normalise` and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

FLOAT = (torch.bfloat16, torch.float16, torch.float32)
BYTES = (torch.uint8,)


@dataclass(frozen=True)
class Row:
    """Published `name` fills `piece` ("" when the parameter has just one) of `parameter`.

    `fix` turns the whole published tensor into the shape of the piece where the two differ; `store` puts the piece's
    data into the parameter; `part` tells apart tensors that fill one piece together, which a format's `combine`
    joins.
    """

    name: str
    parameter: str
    piece: str = ""
    dtypes: tuple[torch.dtype, ...] = FLOAT
    fix: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None
    multiply: bool = False
    part: str = ""


def _heads_only(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A_log: [h], [1, 1, h, 1], or [h] followed by zeros. Raises ValueError for anything else."""
    legacy = x.ndim == 4 and x.shape == (1, 1, *shape, 1)
    flat = x.flatten() if legacy else x
    if flat.ndim != 1 or len(flat) < shape[0]:
        raise ValueError(
            f"shape {list(x.shape)}, expected [{shape[0]}], [1, 1, {shape[0]}, 1] or [{shape[0]}] and zeros"
        )
    tail = flat[shape[0] :]
    if tail.count_nonzero():
        raise ValueError(
            f"{int(tail.count_nonzero())} non-zero values after the first {shape[0]} (heads), expected padding"
        )
    return flat[: shape[0]]


_LAYER = "model.layers.{L}."
_ATTN = _LAYER + "self_attn."
_MLP = _LAYER + "mlp."


def _attention(published: str, parameter: str, piece: str = "", **more: object) -> Row:
    return Row(_ATTN + published, f"layers.{{L}}.self_attn.{parameter}", piece, **more)  # type: ignore[arg-type]


def _mlp(published: str, parameter: str, piece: str = "") -> Row:
    return Row(_MLP + published, f"layers.{{L}}.mlp.{parameter}", piece)


TEXT: tuple[Row, ...] = (
    Row("model.embed_tokens.weight", "embed_tokens.weight"),
    Row("lm_head.weight", "lm_head.weight"),
    Row("model.norm.weight", "norm.weight"),
    Row("model.output_attn_res_norm.weight", "output_attn_res.weight", "norm", multiply=True),
    Row("model.output_attn_res_proj.weight", "output_attn_res.weight", "proj", multiply=True),
    Row(_LAYER + "input_layernorm.weight", "layers.{L}.input_layernorm.weight"),
    Row(_LAYER + "post_attention_layernorm.weight", "layers.{L}.post_attention_layernorm.weight"),
    Row(_LAYER + "self_attention_res_norm.weight", "layers.{L}.self_attention_res.weight", "norm", multiply=True),
    Row(_LAYER + "self_attention_res_proj.weight", "layers.{L}.self_attention_res.weight", "proj", multiply=True),
    Row(_LAYER + "mlp_res_norm.weight", "layers.{L}.mlp_res.weight", "norm", multiply=True),
    Row(_LAYER + "mlp_res_proj.weight", "layers.{L}.mlp_res.weight", "proj", multiply=True),
    # KDA and MLA: projections of the layer's input are one matrix
    *(
        _attention(f"{name}.weight", "in_proj.weight", name)
        for name in ("q_proj", "k_proj", "v_proj", "g_proj", "g_a_proj", "f_a_proj", "b_proj")
    ),
    *(_attention(f"{name}.weight", "in_proj.weight", name) for name in ("q_a_proj", "kv_a_proj_with_mqa")),
    *(_attention(f"{name}.weight", "conv_weight", name) for name in ("q_conv1d", "k_conv1d", "v_conv1d")),
    *(_attention(f"{name}.weight", f"{name}.weight") for name in ("f_b_proj", "g_b_proj", "o_proj", "q_b_proj")),
    *(_attention(f"{name}.weight", f"{name}.weight") for name in ("q_a_layernorm", "kv_a_layernorm", "kv_b_proj")),
    _attention("A_log", "A_log", fix=_heads_only),
    _attention("dt_bias", "dt_bias"),
    _attention("o_norm.weight", "o_norm"),
    # dense layers, and the shared experts of the others
    _mlp("gate_proj.weight", "dense.gate_up_proj.weight", "gate_proj"),
    _mlp("up_proj.weight", "dense.gate_up_proj.weight", "up_proj"),
    _mlp("down_proj.weight", "dense.down_proj.weight"),
    _mlp("shared_experts.gate_proj.weight", "shared_experts.gate_up_proj.weight", "gate_proj"),
    _mlp("shared_experts.up_proj.weight", "shared_experts.gate_up_proj.weight", "up_proj"),
    _mlp("shared_experts.down_proj.weight", "shared_experts.down_proj.weight"),
    _mlp("gate.weight", "gate.weight"),
    _mlp("gate.e_score_correction_bias", "gate.bias"),
    *(_mlp(f"{name}.weight", f"{name}.weight") for name in ("routed_expert_down_proj", "routed_expert_up_proj")),
    _mlp("routed_expert_norm.weight", "routed_expert_norm.weight"),
)

VISION: tuple[Row, ...] = (
    Row("vision_tower.patch_embed.proj.weight", "vision_tower.patch_embed.proj"),
    Row("vision_tower.patch_embed.pos_emb.weight", "vision_tower.patch_embed.pos_emb"),
    *(
        Row(
            f"vision_tower.encoder.blocks.{{B}}.{name}.weight",
            f"vision_tower.blocks.{{B}}.{name.split('.')[-1]}.weight",
        )
        for name in ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
    ),
    Row("vision_tower.encoder.final_layernorm.weight", "vision_tower.final_layernorm.weight"),
    Row("mm_projector.proj.0.weight", "mm_projector.linear_1.weight"),
    Row("mm_projector.proj.2.weight", "mm_projector.linear_2.weight"),
    Row("mm_projector.post_norm.weight", "mm_projector.post_norm.weight"),
)

_EXPERT = (("w1", "w13"), ("w3", "w13"), ("w2", "w2"))


def _expert(published: str, stored: str, name: str, **more: object) -> Row:
    parameter = f"layers.{{L}}.mlp.experts.{stored}"
    return Row(f"{_MLP}experts.{{E}}.{published}", parameter, f"{{E}}.{name}", **more)  # type: ignore[arg-type]


PLAIN_EXPERTS = tuple(_expert(f"{name}.weight", stored, name) for name, stored in _EXPERT)
#: MXFP4 tensors kept packed in memory, and the same tensors expanded while loading (each piece then takes two of them).
PACKED_EXPERTS = tuple(
    _expert(f"{name}.weight{form}", stored + form, name, dtypes=BYTES)
    for name, stored in _EXPERT
    for form in ("_packed", "_scale")
)
EXPANDED_EXPERTS = tuple(
    _expert(f"{name}.weight{form}", stored, name, dtypes=BYTES, part=form)
    for name, stored in _EXPERT
    for form in ("_packed", "_scale")
)


@dataclass(frozen=True)
class Target:
    """Where one published tensor goes: a row with its indices filled in."""

    row: Row
    parameter: str
    piece: str


_INDEXED = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=blocks\.)\d+")
_PLACE = {"layers.": "{L}", "experts.": "{E}", "blocks.": "{B}"}


def normalise(name: str) -> str:
    """Undo the published aliases: an optional `language_model.` in front, and `block_sparse_moe` for `mlp`."""
    return name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")


@dataclass(frozen=True)
class NameMap:
    """Rows looked up in both directions."""

    rows: tuple[Row, ...]
    _by_name: dict[str, Row] = field(init=False, repr=False)
    _by_target: dict[tuple[str, str], list[Row]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {row.name: row for row in self.rows})
        by_target: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            by_target.setdefault((row.parameter, row.piece), []).append(row)
        object.__setattr__(self, "_by_target", by_target)

    def target(self, name: str) -> Target | None:
        """Where the published tensor `name` goes; None when no row knows it."""
        template, indices = _split(normalise(name))
        row = self._by_name.get(template)
        if row is None:
            return None
        return Target(row, _fill(row.parameter, indices), _fill(row.piece, indices))

    def sources(self, parameter: str, piece: str) -> list[tuple[Row, str]]:
        """The rows, with published names as `normalise` leaves them, that together fill one piece of one parameter."""
        template, indices = _split(parameter)
        expert, dot, name = piece.partition(".")
        if dot:
            indices["{E}"], piece = expert, f"{{E}}.{name}"
        return [(row, _fill(row.name, indices)) for row in self._by_target.get((template, piece), [])]


def _split(name: str) -> tuple[str, dict[str, str]]:
    indices: dict[str, str] = {}

    def take(match: re.Match[str]) -> str:
        place = next(place for prefix, place in _PLACE.items() if name.endswith(prefix, 0, match.start()))
        indices[place] = match.group()
        return place

    return _INDEXED.sub(take, name), indices


def _fill(template: str, indices: Mapping[str, str]) -> str:
    for place, index in indices.items():
        template = template.replace(place, index)
    return template
