"""What a published checkpoint contains, without the checkpoint: every tensor's name, shape and dtype.

A manifest (weights/manifests/*.json) lists name patterns. It says by kind ("kda", "moe") which layers a pattern is for;
the configuration has their numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch

from kimi_k3_npu.checkpoint.safetensors_header import DTYPES
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import ConfigError
from kimi_k3_npu.resources import resource_path


@dataclass(frozen=True, kw_only=True)
class TensorPattern:
    """Tensors that differ only in the numbers put for `{L}` (0-based layer), `{E}` (expert) and `{B}` (vision block).

    `count` is how many the published checkpoint has. `layers` is the set of layers that `{L}` stands for: "all", "kda",
    "mla", "dense" or "moe"; None if the name has no `{L}`.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    layers: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A published checkpoint: its tensors, their total size, and the number of its shard files, if that is known."""

    name: str
    source: str
    notes: tuple[str, ...]
    total_tensors: int
    total_bytes: int
    shards: int | None
    patterns: tuple[TensorPattern, ...]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How far the numbers in a pattern run for one model. Layers are 0-based."""

    num_layers: int
    kda_layers: tuple[int, ...]
    mla_layers: tuple[int, ...]
    dense_layers: tuple[int, ...]
    moe_layers: tuple[int, ...]
    num_experts: int
    num_vision_blocks: int

    @classmethod
    def of(cls, config: KimiK3Config) -> Extent:
        """That of the model of a config.json."""
        text = config.text
        layers = range(text.num_hidden_layers)
        return cls(
            num_layers=text.num_hidden_layers,
            kda_layers=text.kda_layers,
            mla_layers=text.mla_layers,
            dense_layers=tuple(layer for layer in layers if not text.is_moe(layer)),
            moe_layers=text.moe_layers,
            num_experts=text.num_experts,
            num_vision_blocks=config.vision.vt_num_hidden_layers if config.vision else 0,
        )


class TensorSpec(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def load_manifest(name: str) -> Manifest:
    """The manifest weights/manifests/`name`.json. Raises ConfigError, naming those there are, if it is not there."""
    folder = resource_path("weights", "manifests")
    file = folder / f"{name}.json"
    manifests = sorted(path.stem for path in folder.glob("*.json") if not path.stem.endswith("-config"))
    if name not in manifests:
        raise ConfigError(f"no manifest {name!r}; there are: {', '.join(manifests)} (in {folder})")
    fields = json.loads(file.read_text(encoding="utf-8"))
    patterns = tuple(
        TensorPattern(**{**pattern, "shape": tuple(pattern["shape"]), "dtype": DTYPES[pattern["dtype"]]})
        for pattern in fields.pop("patterns")
    )
    return Manifest(**{**fields, "notes": tuple(fields["notes"])}, patterns=patterns)


def expand(manifest: Manifest, extent: Extent) -> Iterator[TensorSpec]:
    """Every tensor of `manifest` for a model of this `extent`, pattern by pattern.

    Raises:
        ConfigError: The model does not have as many tensors of a pattern as the published checkpoint.
    """
    layers = {
        None: (),
        "all": tuple(range(extent.num_layers)),
        "kda": extent.kda_layers,
        "mla": extent.mla_layers,
        "dense": extent.dense_layers,
        "moe": extent.moe_layers,
    }
    for pattern in manifest.patterns:
        numbers = {"L": layers[pattern.layers], "E": range(extent.num_experts), "B": range(extent.num_vision_blocks)}
        used = [letter for letter in numbers if f"{{{letter}}}" in pattern.name]
        names = [
            pattern.name.format(**dict(zip(used, choice, strict=True)))
            for choice in product(*(numbers[letter] for letter in used))
        ]
        if len(names) != pattern.count:
            raise ConfigError(
                f"manifest {manifest.name} has {pattern.count} tensors {pattern.name}, this config makes {len(names)}"
            )
        for name in names:
            yield TensorSpec(name, pattern.shape, pattern.dtype)
