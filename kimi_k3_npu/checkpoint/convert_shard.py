"""One shard of a conversion: which tensors its weights are read from, which they become, and writing them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kimi_k3_npu.checkpoint.error_report import ErrorReport
from kimi_k3_npu.checkpoint.manifest import TensorSpec
from kimi_k3_npu.checkpoint.plan import Assignment
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.stream import bytes_to_read, read_weights
from kimi_k3_npu.checkpoint.writer import ShardWriter
from kimi_k3_npu.errors import CheckpointError, Fault
from kimi_k3_npu.formats import PLAIN, Format, Tensors

_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class Conversion:
    """One weight: the tensors it is stored in, the format it gets, and its tensors in that by what follows its name."""

    sources: tuple[Assignment, ...]
    format: Format
    results: dict[str, TensorSpec]

    @property
    def is_copy(self) -> bool:
        return self.format is self.sources[0].target.format

    def run(self, tensors: Tensors, report: ErrorReport) -> Tensors:
        """The tensors of the result. What they have lost is added to `report`."""
        if self.is_copy:
            return tensors
        target = self.sources[0].target
        before = target.format.values(tensors, torch.float32)
        result = self.format.quantize(target.weight, before)
        block = _EXPERT.sub(".experts.", target.weight)
        report.add(block, target.weight, before, self.format.values(result, torch.float32))
        return result


@dataclass(frozen=True)
class Shard:
    """One file of the result."""

    name: str
    conversions: tuple[Conversion, ...]

    @property
    def sources(self) -> list[Assignment]:
        return [source for conversion in self.conversions for source in conversion.sources]

    @property
    def tensors(self) -> list[TensorSpec]:
        return [spec for conversion in self.conversions for spec in conversion.results.values()]

    def bytes_to_read(self, checkpoint: Checkpoint) -> int:
        return bytes_to_read(checkpoint, self.sources)

    def write(
        self,
        checkpoint: Checkpoint,
        part: Path,
        device: torch.device | str,
        on_bytes: Callable[[int], None],
    ) -> tuple[ShardWriter, ErrorReport]:
        """Convert into the file `part`, which is then whole but not yet where it belongs.

        Raises:
            CheckpointError: Something inside the tensors is wrong; the file is then not whole.
        """
        by_weight = {conversion.sources[0].target.weight: conversion for conversion in self.conversions}
        writer, report, faults = ShardWriter(part, self.tensors), ErrorReport(), list[Fault]()
        try:
            for assignment, tensors in read_weights(checkpoint, self.sources, faults, on_bytes=on_bytes):
                if faults:
                    raise CheckpointError.from_faults(checkpoint.folder, faults)
                conversion = by_weight[assignment.target.weight]
                result = conversion.run({name: tensor.to(device) for name, tensor in tensors.items()}, report)
                for suffix, spec in conversion.results.items():
                    writer.write(spec.name, result[suffix])
            if faults:
                raise CheckpointError.from_faults(checkpoint.folder, faults)
        except BaseException:
            writer.close()
            raise
        return writer, report


def plan_shards(checkpoint: Checkpoint, assignments: Iterable[Assignment], experts: Format, name: str) -> list[Shard]:
    """The files of the result, called `name` with a number: one for each of the checkpoint's, with the same weights.

    A weight whose tensors are spread over files goes where its codes are.
    """
    weights: dict[str, dict[str, Assignment]] = {}
    for assignment in assignments:
        weights.setdefault(assignment.target.weight, {})[assignment.target.part.suffix] = assignment
    files: dict[str, list[tuple[int, Conversion]]] = {}
    for parts in weights.values():
        sources = tuple(parts[part.suffix] for part in next(iter(parts.values())).target.format.parts)
        entry = checkpoint.entries[sources[0].name]
        files.setdefault(str(entry.file), []).append((entry.offset, _conversion(checkpoint, sources, experts)))
    shards = []
    for number, (_, found) in enumerate(sorted(files.items()), start=1):
        conversions = tuple(conversion for _, conversion in sorted(found, key=lambda pair: pair[0]))
        shards.append(Shard(f"{name}-{number:05}-of-{len(files):06}.safetensors", conversions))
    return shards


def _conversion(checkpoint: Checkpoint, sources: Sequence[Assignment], experts: Format) -> Conversion:
    target = sources[0].target
    format = experts if target.row.is_expert else PLAIN
    if format is target.format:
        copies = {source.target.part.suffix: checkpoint.entries[source.name] for source in sources}
        specs = {suffix: TensorSpec(entry.name, entry.shape, entry.dtype) for suffix, entry in copies.items()}
        return Conversion(tuple(sources), format, specs)
    stem, matrix = sources[0].name.removesuffix(target.part.suffix), sources[0].record.shape
    written = format.written(target.weight, matrix)
    if written is None:
        raise CheckpointError(f"{sources[0].name}: a weight {list(matrix)} cannot be stored as {format.title}")
    specs = {suffix: TensorSpec(stem + suffix, shape, dtype) for suffix, (shape, dtype) in written.items()}
    return Conversion(tuple(sources), format, specs)
