"""Write a model as a published checkpoint: the loader's name map, read backwards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kimi_k3_npu.checkpoint.load import VISION_PREFIXES, name_map
from kimi_k3_npu.checkpoint.names import Row
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.moe import PackedExperts
from kimi_k3_npu.ops.quant import mxfp4_quantize
from kimi_k3_npu.parallel.shard import Piece, layers

INDEX = "model.safetensors.index.json"

#: Published as fp32 whatever the dtype of the rest.
_FP32 = ("A_log", "dt_bias", "o_norm.weight", "conv1d.weight", "e_score_correction_bias")


def published_name(name: str, config: KimiK3Config) -> str:
    """The spelling that checkpoints of this model type use, of a `name` as `names.normalise` leaves it."""
    if name.startswith(VISION_PREFIXES):
        return name
    if (match := re.match(r"(model\.layers\.(\d+)\.)mlp\.", name)) and config.text.is_moe(int(match[2])):
        name = f"{match[1]}block_sparse_moe.{name[match.end() :]}"
    return f"language_model.{name}" if config.model_type == "kimi_k3" else name


def export_tensors(model: KimiK3ForCausalLM, *, mxfp4_experts: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint that loads as `model`, with its published name, shape and dtype.

    Loading them gives back the same parameters, bit for bit; only plain experts are rounded when `mxfp4_experts` packs
    them (packed ones stay as they are). A residual mixer is known by its product only, so its norm is all ones. Router
    and mixers, fp32 in memory, get the model's dtype where that loses nothing.

    Raises:
        ValueError: The model is one rank of several, or an expert to be packed holds NaN or infinity.
    """
    if model.mesh.layout.world > 1:
        raise ValueError("this model holds one rank's shards; only a whole model can be exported")
    packed = any(isinstance(module, PackedExperts) for module in model.modules())
    names = name_map(packed or mxfp4_experts, packed)
    for path, layer in layers(model):
        for parameter, data in layer.named_parameters(recurse=False):
            for piece, record in layer.pieces(parameter).items():
                sources = names.sources(f"{path}.{parameter}", piece)
                assert sources, f"no row of the name map publishes piece {piece!r} of {path}.{parameter}"
                for (row, name), tensor in zip(sources, _published(data.detach(), piece, record, sources), strict=True):
                    yield published_name(name, model.config), _finish(tensor, row, model)


def write_checkpoint(tensors: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = 4 << 30) -> None:
    """Write `tensors` to numbered shards in `folder`, and their index. A shard ends once it holds `shard_bytes`.

    Holds one shard in memory. Files get their final names when all are written, the index last.
    """
    parts: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in _shards(tensors, shard_bytes):
        part = folder / f"model-{len(parts) + 1:05}.part"
        save_file(shard, part, metadata={"format": "pt"})
        parts.append((part, list(shard)))
        total += sum(tensor.nbytes for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, (part, names) in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):06}.safetensors"
        part.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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


def _published(data: Tensor, piece: str, record: Piece, sources: list[tuple[Row, str]]) -> list[Tensor]:
    """What each of `sources` holds of one piece of the parameter `data`."""
    row = sources[0][0]
    if row.multiply and piece == "norm":
        return [data.new_ones(record.shape)]
    tensor = data[record.target].reshape(record.shape)
    if not row.part:
        return [tensor]
    packed, scale = mxfp4_quantize(tensor)
    return [{"_packed": packed, "_scale": scale}[row.part] for row, _ in sources]


def _finish(tensor: Tensor, row: Row, model: KimiK3ForCausalLM) -> Tensor:
    """A copy on the CPU in the published dtype and length."""
    tensor = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    attention = model.config.text
    if row.name.endswith("A_log") and model.config.model_type == "kimi_k3":
        padding = max(attention.kda_head_dim - attention.kda_num_heads, 0)
        return torch.cat([tensor, tensor.new_zeros(padding)])
    if tensor.dtype != torch.float32 or row.name.endswith(_FP32):
        return tensor
    narrow = tensor.to(model.dtype)
    return narrow if torch.equal(narrow.float(), tensor) else tensor
