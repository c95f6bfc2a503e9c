"""Load a published checkpoint into a model: only this rank's slices, streamed, with every fault reported before use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_k3_npu.checkpoint.byte_ranges import select
from kimi_k3_npu.checkpoint.names import EXPANDED_EXPERTS, PACKED_EXPERTS, PLAIN_EXPERTS, TEXT, VISION, NameMap
from kimi_k3_npu.checkpoint.plan import Assignment, plan_loading
from kimi_k3_npu.checkpoint.reader import Checkpoint, ReadRequest
from kimi_k3_npu.config import MXFP4_GROUP, KimiK3Config
from kimi_k3_npu.errors import CheckpointError, Fault
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.ops.quant import mxfp4_dequantize
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh

ExpertWeights = Literal["auto", "packed", "bf16"]
#: Called with the bytes read so far and the bytes to read.
Progress = Callable[[int, int], None]

VISION_PREFIXES = ("vision_tower.", "mm_projector.")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    layout: ParallelLayout | None = None,
    rank: int = 0,
    expert_weights: ExpertWeights = "auto",
    progress: Progress | None = None,
) -> KimiK3ForCausalLM:
    """The model of the checkpoint folder `path`, ready to run.

    Args:
        device: Where the weights go.
        dtype: Of weights and activations; None takes the config's. Router, gates, states and mixers are always fp32.
        layout: How the model is spread over ranks; only this rank's slices are read. With torch.distributed
            initialised the model can run; without, it can only be looked at.
        rank: Which rank of `layout` to build when torch.distributed is not initialised.
        expert_weights: How MXFP4 experts stay in memory: "packed" (each expanded while it is used), "bf16" (expanded
            once, to `dtype`; MXFP4 values are exact in bf16), or "auto": as they are stored.
        progress: Called as bytes arrive.

    Raises:
        ConfigError: config.json is missing, broken, or not a model of this package.
        LayoutError: The layout cannot split this model.
        CheckpointError: The tensors are not exactly those of the model; lists all faults.
    """
    config = KimiK3Config.from_pretrained(path)
    checkpoint = Checkpoint.open(path)
    packed_on_disk = _experts_are_packed(checkpoint, config)
    if expert_weights == "packed" and not packed_on_disk:
        raise CheckpointError(f"{path}: its experts are not packed; use expert_weights 'auto' or 'bf16'")
    packed = packed_on_disk and expert_weights != "bf16"
    vision = any(name.startswith(VISION_PREFIXES) for name in checkpoint.entries)
    layout = layout or ParallelLayout()
    layout.check(config.text, expert_group=MXFP4_GROUP if packed_on_disk else 1)
    mesh = Mesh.distributed(layout) if layout.world > 1 and dist.is_initialized() else Mesh.inspect(layout, rank)
    with torch.device(device):
        model = KimiK3ForCausalLM(
            config, mesh, dtype=dtype or _config_dtype(config), packed_experts=packed, vision=vision
        )
    load_weights(model, checkpoint, name_map(packed_on_disk, packed), progress)
    return model.requires_grad_(False).eval()


def name_map(packed_on_disk: bool, packed_in_memory: bool) -> NameMap:
    """The rows for one way of storing experts on disk and in memory."""
    experts = PLAIN_EXPERTS if not packed_on_disk else PACKED_EXPERTS if packed_in_memory else EXPANDED_EXPERTS
    return NameMap(TEXT + VISION + experts)


def load_weights(
    model: KimiK3ForCausalLM, checkpoint: Checkpoint, names: NameMap, progress: Progress | None = None
) -> None:
    """Fill every parameter of `model`. Raises CheckpointError with all faults; the model is then not to be used."""
    plan = plan_loading(model, checkpoint.entries, names)
    if plan.faults:
        raise CheckpointError.from_faults(checkpoint.folder, plan.faults)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    requests = [ReadRequest(a.name, a.source, a) for a in plan.assignments]
    total = sum(select(checkpoint.entries[request.name], request.source).nbytes for request in requests)
    store = _Store(model)
    for request, tensor in checkpoint.stream(requests, on_bytes=count):
        store.put(request.key, tensor)
    if store.faults:
        raise CheckpointError.from_faults(checkpoint.folder, store.faults)
    model.prepare()


class _Store:
    """Puts published tensors into parameters; holds one back until the tensor it belongs with has arrived."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._waiting: dict[tuple[str, str], dict[str, Tensor]] = {}
        self._started: set[str] = set()
        self.faults: list[Fault] = []

    @torch.no_grad()
    def put(self, a: Assignment, tensor: Tensor) -> None:
        parameter = self._parameters[a.parameter]
        if a.row.fix:
            try:
                tensor = a.row.fix(tensor, a.record.shape)[a.record.source]
            except ValueError as error:
                self.faults.append(Fault("wrong content", a.name, str(error)))
                return
        if a.row.part:
            parts = self._waiting.setdefault((a.parameter, a.piece), {})
            parts[a.row.part] = tensor
            if len(parts) < 2:
                return
            del self._waiting[a.parameter, a.piece]
            tensor = mxfp4_dequantize(parts["_packed"], parts["_scale"], parameter.dtype)
        place = parameter[a.record.target]
        tensor = tensor.reshape(place.shape)
        if not a.row.multiply:
            place.copy_(tensor)
        elif a.parameter in self._started:
            place.mul_(tensor.to(parameter))
        else:
            place.copy_(tensor)
            self._started.add(a.parameter)


def _experts_are_packed(checkpoint: Checkpoint, config: KimiK3Config) -> bool:
    packed = any(name.endswith(".weight_packed") for name in checkpoint.entries)
    if packed and config.quantization != "mxfp4":
        raise CheckpointError(
            f"{checkpoint.folder}: has *.weight_packed tensors, but no quantization_config in config.json says MXFP4"
        )
    if config.quantization == "mxfp4" and not packed:
        raise CheckpointError(
            f"{checkpoint.folder}: config.json says MXFP4 (quantization_config), but no tensor is named *.weight_packed"
        )
    return packed


def _config_dtype(config: KimiK3Config) -> torch.dtype:
    if config.dtype not in DTYPES:
        raise CheckpointError(f"config.json: dtype is {config.dtype!r}; supported: {', '.join(DTYPES)}")
    return DTYPES[config.dtype]
