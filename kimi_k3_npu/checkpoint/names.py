"""The one map from published tensor names to parameters.

A row says: this published name fills that piece of that parameter. `{L}` is a 0-based layer, `{E}` an expert, `{B}` a
vision block. Loading, verifying and converting all read these rows; the shapes and the shard of a piece are with the
parameter (`parallel/shard.py`). Where a checkpoint stores a weight as several tensors, their names follow from the
row's and from the format it is stored in (`formats/`). Published aliases are undone in `normalise` and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.formats import PLAIN, Format, Part, keepers, suffixes


@dataclass(frozen=True)
class Row:
    """Published `name` fills `piece` ("" when the parameter has just one) of `parameter`.

    `fix` turns the whole published tensor into the shape of the piece where the two differ. The pieces of a `multiply`
    parameter are multiplied with each other. `is_expert`: a routed expert, which a model can keep in other formats.
    """

    name: str
    parameter: str
    piece: str = ""
    fix: Callable[[Tensor, tuple[int, ...]], Tensor] | None = None
    multiply: bool = False
    is_expert: bool = False


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
    Row("mm_projector.rot_proj.weight", "mm_projector.rot_proj.weight"),
)

EXPERT: tuple[Row, ...] = tuple(
    Row(f"{_MLP}experts.{{E}}.{name}.weight", f"layers.{{L}}.mlp.experts.{stored}", f"{{E}}.{name}", is_expert=True)
    for name, stored in (("w1", "w13"), ("w3", "w13"), ("w2", "w2"))
)

ROWS = TEXT + VISION + EXPERT

#: Published as fp32 whatever the dtype of the rest.
FP32_NAMES = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
#: ModelSlim's rotation of the hidden state, which images need and text has in its weights.
ROTATION = "mm_projector.rot_proj.weight"


@dataclass(frozen=True)
class Target:
    """Where one published tensor goes; indices are filled in.

    Args:
        row: That of its weight.
        format: What the weight is stored in.
        part: Which of the format's tensors it is.
        weight: The name of the weight, the same for all its parts.
        parameter: What the weight fills a piece of. An expert's may be kept in several, named by `kept` after it.
        piece: Which piece.
        kept: What follows `parameter` in the names of the parameters; ("",) when there is just the one.
    """

    row: Row
    format: Format
    part: Part
    weight: str
    parameter: str
    piece: str
    kept: tuple[str, ...] = ("",)

    @property
    def first(self) -> str:
        """The parameter that stands for all of them where only one is looked at."""
        return self.parameter + self.kept[0]


_INDEXED = re.compile(r"(?<=layers\.)\d+|(?<=experts\.)\d+|(?<=blocks\.)\d+")
_PLACE = {"layers.": "{L}", "experts.": "{E}", "blocks.": "{B}"}


def normalise(name: str) -> str:
    """Undo the published aliases: an optional `language_model.` in front, and `block_sparse_moe` for `mlp`."""
    return name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp.")


def published_name(name: str, config: KimiK3Config) -> str:
    """The spelling that checkpoints of this model type use, of a `name` as `normalise` leaves it."""
    if name.startswith(VISION_PREFIXES):
        return name
    if (match := re.match(r"(model\.layers\.(\d+)\.)mlp\.", name)) and config.text.is_moe(int(match[2])):
        name = f"{match[1]}block_sparse_moe.{name[match.end() :]}"
    return f"language_model.{name}" if config.model_type == "kimi_k3" else name


def weight_of(name: str) -> tuple[str, str]:
    """The weight that a tensor is part of, and which part: of "a.weight_scale" these are "a.weight", ".weight_scale".

    A name with no known end is that of a weight which is never stored in parts.
    """
    for suffix in suffixes():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix)}.weight", suffix
    return name, ""


@dataclass(frozen=True)
class NameMap:
    """ROWS looked up in both directions, for one checkpoint and one model.

    Args:
        format_of: The format that a weight is stored in, by its normalised name.
        experts: The format in which the model keeps routed experts.
    """

    format_of: Callable[[str], Format] = lambda matrix: PLAIN
    experts: Format = PLAIN
    _by_name: dict[str, Row] = field(init=False, repr=False)
    _by_target: dict[tuple[str, str], Row] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {row.name: row for row in ROWS})
        by_target = {(row.parameter + self._kept(row)[0], row.piece): row for row in ROWS}
        object.__setattr__(self, "_by_target", by_target)

    def _kept(self, row: Row) -> tuple[str, ...]:
        return tuple(self.experts.kept) if row.is_expert else ("",)

    def _target(self, row: Row, format: Format, part: Part, indices: Mapping[str, str]) -> Target:
        weight, parameter, piece = (_fill(text, indices) for text in (row.name, row.parameter, row.piece))
        return Target(row, format, part, weight, parameter, piece, self._kept(row))

    def target(self, name: str) -> Target | str:
        """Where the published tensor `name` goes, or why it goes nowhere."""
        weight, suffix = weight_of(normalise(name))
        template, indices = _split(weight)
        row = self._by_name.get(template)
        if row is None:
            return "no tensor of that name belongs to this model"
        format = self.format_of(weight)
        part = format.part(suffix or ".weight")
        if part is None:
            return f"its weight is stored as {format.title}, which has no {suffix}"
        if row.is_expert and self.experts not in (PLAIN, *keepers(format)):
            return f"is stored as {format.title}, which cannot be kept as {self.experts.name} like other experts"
        return self._target(row, format, part, indices)

    def sources(self, parameter: str, piece: str) -> list[tuple[Target, str]]:
        """What fills one piece of one parameter, with published names as `normalise` leaves them.

        Empty for the parameters beside the first of those that one matrix is kept in.
        """
        template, indices = _split(parameter)
        expert, dot, name = piece.partition(".")
        if dot:
            indices["{E}"], piece = expert, f"{{E}}.{name}"
        row = self._by_target.get((template, piece))
        if row is None:
            return []
        weight = _fill(row.name, indices)
        format, stem = self.format_of(weight), weight.removesuffix(".weight")
        if stem == weight:
            return [(self._target(row, format, format.parts[0], indices), weight)]
        return [(self._target(row, format, part, indices), stem + part.suffix) for part in format.parts]


def template_of(name: str) -> str:
    """A tensor's name with places for its numbers, as in ROWS: `{L}` a layer, `{E}` an expert, `{B}` a vision block."""
    return _split(name)[0]


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
