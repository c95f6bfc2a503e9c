"""Match a checkpoint's tensors with a model's parameters, before anything is read.

Every tensor must be claimed once, every piece of every parameter filled once; what is not so is a fault, and all
faults are found together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from kimi_k3_npu.checkpoint.names import NameMap, Row, Target
from kimi_k3_npu.config import MXFP4_GROUP, KimiK3Config
from kimi_k3_npu.errors import Fault
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.shard import Piece, layers

#: Columns of the logical matrix in one stored column, by the kind of tensor.
_PACKING = {"": 1, "_packed": 2, "_scale": MXFP4_GROUP}


class TensorInfo(Protocol):
    """What a plan needs to know of a published tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Assignment:
    """The published tensor `name` fills `record` of `parameter`."""

    name: str
    row: Row
    parameter: str
    piece: str
    record: Piece

    @property
    def source(self) -> tuple[slice, ...]:
        """What to read of the published tensor. A row with a `fix` needs all of it; packed columns count several."""
        if self.row.fix:
            return ()
        packing, last = _PACKING[self.row.part], len(self.record.shape) - 1
        return tuple(
            part if i < last or part == slice(None) else slice(part.start // packing, part.stop // packing)
            for i, part in enumerate(self.record.source)
        )


@dataclass(frozen=True)
class LoadPlan:
    """What to read for this rank, what other ranks hold, and everything that is wrong."""

    assignments: list[Assignment]
    elsewhere: list[str]
    faults: list[Fault]


def plan_loading(
    model: KimiK3ForCausalLM,
    tensors: Mapping[str, TensorInfo],
    names: NameMap,
    *,
    skip: Collection[str] = (),
) -> LoadPlan:
    """Assign each of `tensors` to the parameter piece it fills; those whose names start with one of `skip` are left
    out."""
    records = {
        f"{path}.{name}": layer.pieces(name)
        for path, layer in layers(model)
        for name, _ in layer.named_parameters(recurse=False)
    }
    config, plan = model.config, LoadPlan([], [], [])
    claimed: dict[tuple[str, str, str], str] = {}
    for name, info in tensors.items():
        if name.removeprefix("language_model.").startswith(tuple(skip)):
            continue
        target = names.target(name)
        if target and model.is_elsewhere(target.parameter):
            plan.elsewhere.append(name)
            continue
        if target is None or target.parameter not in records:
            plan.faults.append(Fault("unknown tensor", name, _why_unknown(target, config)))
            continue
        record = records[target.parameter].get(target.piece)
        if record is None:
            if why := _why_no_piece(target, config):
                plan.faults.append(Fault("unknown tensor", name, why))
            else:
                plan.elsewhere.append(name)
            continue
        first = claimed.setdefault((target.parameter, target.piece, target.row.part), name)
        if first is not name:
            plan.faults.append(Fault("tensor given twice", name, f"it and {first} are names of the same tensor"))
        elif fault := _check(name, info, target.row, record):
            plan.faults.append(fault)
        else:
            plan.assignments.append(Assignment(name, target.row, target.parameter, target.piece, record))
    plan.faults.extend(_missing(records, claimed, tensors, names))
    return plan


def _check(name: str, info: TensorInfo, row: Row, record: Piece) -> Fault | None:
    if info.dtype not in row.dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in row.dtypes)
        return Fault("wrong dtype", name, f"is {str(info.dtype).removeprefix('torch.')}, expected {wanted}")
    shape = (*record.shape[:-1], record.shape[-1] // _PACKING[row.part])
    if row.fix is None and tuple(info.shape) != shape:
        return Fault("wrong shape", name, f"is {list(info.shape)}, expected {list(shape)}")
    return None


def _why_unknown(target: Target | None, config: KimiK3Config) -> str:
    if target is None:
        return "no tensor of that name belongs to this model"
    parts = target.parameter.split(".")
    if parts[0] in ("vision_tower", "mm_projector"):
        return "config.json has no vision_config that would use it"
    if parts[0] != "layers":
        return "config.json leaves this part out"
    layer = int(parts[1])
    if layer >= config.text.num_hidden_layers:
        return f"layer {layer}, but config.json has num_hidden_layers = {config.text.num_hidden_layers}"
    return f"layer {layer} of this config has none ({_describe(config, layer)})"


def _why_no_piece(target: Target, config: KimiK3Config) -> str | None:
    """None when the piece exists, on another rank."""
    expert, dot, _ = target.piece.partition(".")
    if dot and int(expert) < config.text.num_experts:
        return None
    if dot:
        return f"expert {expert}, but config.json has num_experts = {config.text.num_experts}"
    return f"its layer has none ({_describe(config, int(target.parameter.split('.')[1]))})"


def _describe(config: KimiK3Config, layer: int) -> str:
    return f"{config.text.layer_kinds[layer]} attention, {'experts' if config.text.is_moe(layer) else 'dense MLP'}"


def _missing(
    records: Mapping[str, Mapping[str, Piece]],
    claimed: Mapping[tuple[str, str, str], str],
    tensors: Iterable[str],
    names: NameMap,
) -> Iterable[Fault]:
    prefix = "language_model." if any(name.startswith("language_model.") for name in tensors) else ""
    for parameter, pieces in records.items():
        for piece in pieces:
            for row, published in names.sources(parameter, piece):
                if (parameter, piece, row.part) not in claimed:
                    full = published if published.startswith(("vision", "mm_")) else prefix + published
                    if ".experts." in full or ".gate." in full or ".shared_experts." in full or ".routed_" in full:
                        full = full.replace(".mlp.", ".block_sparse_moe.")
                    yield Fault("missing tensor", full, "the model needs it and no shard has it")
