"""Write a model as a published checkpoint: the loader's name map, read backwards."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.checkpoint.names import FP32_NAMES, Target, published_name
from kimi_k3_npu.checkpoint.safetensors_header import load_json
from kimi_k3_npu.checkpoint.storage import Storage
from kimi_k3_npu.checkpoint.writer import move, write_shard, write_text
from kimi_k3_npu.formats import FORMATS, PLAIN, Format
from kimi_k3_npu.locks import writing_to
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.shard import Layer, layers

INDEX = "model.safetensors.index.json"

#: Holds new shards until all are written.
WORK = ".export"

_SHARD = re.compile(r"model-\d{5}-of-\d{6}\.safetensors")


def export_tensors(model: KimiK3ForCausalLM, *, experts: Format | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint that loads as `model`, with its published name, shape and dtype.

    Loading them gives back the same parameters, bit for bit; only plain experts are rounded when they are to be written
    as `experts` (packed ones stay as they are). A residual mixer is known by its product only, so its norm is all ones.
    Router and mixers, fp32 in memory, get the model's dtype where that loses nothing.

    Raises:
        ValueError: The model is one rank of several, keeps experts as they are not stored, or an expert to be packed
            holds NaN or infinity.
    """
    if model.mesh.layout.world > 1:
        raise ValueError("this model holds one rank's shards; only a whole model can be exported")
    kept = FORMATS[model.experts]
    written = [each.name for each in FORMATS.values() if each.is_kept_as_stored]
    if kept.name not in written:
        raise ValueError(f"this model keeps experts as {kept.name}; export writes those kept as {', '.join(written)}")
    names = Storage(PLAIN.folder, (experts or PLAIN) if kept is PLAIN else kept).names(kept)
    for path, layer in layers(model):
        for parameter, _ in layer.named_parameters(recurse=False):
            for piece in layer.pieces(parameter):
                sources = names.sources(f"{path}.{parameter}", piece)
                for (target, name), tensor in zip(sources, _published(layer, parameter, piece, sources), strict=True):
                    yield published_name(name, model.config), _finish(tensor, target, model)


def write_checkpoint(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = 4 << 30) -> None:
    """Write `tensors` to numbered shards in `folder`, and their index. A shard ends once it holds `shard_bytes`.

    Holds one shard in memory. Numbered shards that are there are replaced or removed. Whatever stops this, the folder
    then holds the checkpoint before, the new one, or one whose index names a missing shard; writing again mends it.

    Raises:
        KimiK3Error: Another process writes to `folder`.
    """
    with writing_to(folder, "export"):
        replace_checkpoint(tensors, folder, shard_bytes=shard_bytes)


def replace_checkpoint(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int) -> None:
    """`write_checkpoint` for a caller that has `folder` locked.

    New shards never meet old ones under one index: they are made in a folder of their own, which the new index first
    names with them. From then on the old shards are not part of the checkpoint, and the new ones take their places.
    """
    _put_in_place(folder)  # those of an export that was stopped: they may be all that is whole
    work = folder / WORK
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    try:
        index = _write_shards(tensors, work, shard_bytes)
    except BaseException:
        shutil.rmtree(work)
        raise
    _write_index(folder, index)
    _put_in_place(folder)
    work.rmdir()


def _write_shards(tensors: Iterable[tuple[str, Tensor]], work: Path, shard_bytes: int) -> dict[str, Any]:
    """Returns the index that names the shards where they are."""
    parts: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        part = work / f"{len(parts) + 1:05}.part"
        write_shard(part, shard)
        parts.append((part, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, (part, names) in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):06}.safetensors"
        move(part, work / file)
        weight_map |= dict.fromkeys(names, f"{WORK}/{file}")
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _put_in_place(folder: Path) -> None:
    """Move the shards that the index names in WORK to where they belong, those that are left after a stop; then the
    index says so. Nothing happens if it names none there."""
    try:
        index = load_json((folder / INDEX).read_bytes(), lambda key: None)
        weight_map = {name: PurePosixPath(shard) for name, shard in index["weight_map"].items()}
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):  # none, or none of ours
        return
    shards = set(weight_map.values())
    if not any(shard.parts[:1] == (WORK,) for shard in shards):
        return
    for shard in sorted(shards):
        if (folder / shard).is_file():
            move(folder / shard, folder / shard.name)
    _write_index(folder, index | {"weight_map": {name: shard.name for name, shard in weight_map.items()}})
    names = {shard.name for shard in shards}
    for old in folder.iterdir():
        if _SHARD.fullmatch(old.name) and old.name not in names:
            old.unlink()


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _shards(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        shard[name] = tensor
        size += tensor.nbytes
        if size >= shard_bytes:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _published(layer: Layer, parameter: str, piece: str, sources: list[tuple[Target, str]]) -> list[Tensor]:
    """What each of `sources` holds of one piece of `parameter`."""
    record = layer.pieces(parameter)[piece]
    targets = [target for target, _ in sources]
    if not targets:  # it has been exported with the first parameter of those that experts are kept in
        return []
    if targets[0].row.multiply and piece == "norm":
        return [layer.get_parameter(parameter).detach().new_ones(record.shape)]
    if targets[0].kept != ("",):
        first = parameter.removesuffix(targets[0].kept[0])
        return [_kept(layer, first + target.part.suffix.removeprefix(".weight"), piece, target) for target in targets]
    tensor = layer.get_parameter(parameter).detach()[record.target].reshape(record.shape)
    format = targets[0].format
    if format is PLAIN:
        return [tensor]
    tensors = format.quantize(targets[0].weight, tensor)
    return [tensors[target.part.suffix] for target in targets]


def _kept(layer: Layer, parameter: str, piece: str, target: Target) -> Tensor:
    """One tensor of an expert that is kept as it is stored."""
    record = layer.pieces(parameter)[piece]
    return layer.get_parameter(parameter).detach()[record.target].reshape(target.part.shapes(record.shape)[0])


def _finish(tensor: Tensor, target: Target, model: KimiK3ForCausalLM) -> Tensor:
    """A copy on the CPU in the published dtype and length."""
    tensor, name = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format), target.row.name
    attention = model.config.text
    if name.endswith("A_log") and model.config.model_type == "kimi_k3":
        padding = max(attention.kda_head_dim - attention.kda_num_heads, 0)
        return torch.cat([tensor, tensor.new_zeros(padding)])
    if tensor.dtype != torch.float32 or name.endswith(FP32_NAMES):
        return tensor
    narrow = tensor.to(model.dtype)
    return narrow if torch.equal(narrow.float(), tensor) else tensor
