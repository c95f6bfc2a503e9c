"""Images in SGLang: whether a launch takes them, and how they get into a prompt.

SGLang's tokenizer process prepares them with the folder's processor, or with ours where a folder names it, and puts a
value of its own in the place of every image feature. In the pass that reads those places, our tower fills them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k3_npu.checkpoint.folder import has_weights
from kimi_k3_npu.checkpoint.load import VISION_PREFIXES
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.engines.sglang import IMPL
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.images import SETTINGS_FILE
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.vision import image_features

#: The attribute of SGLang's model configuration that tells the model whether the launch takes images.
TAKES_IMAGES = "kimi_k3_npu_takes_images"

_log = logging.getLogger(__name__)


def wanted(model_path: str, asked: bool | None, revision: str | None = None) -> bool:
    """Whether a launch takes images: if and only if its model has vision weights, unless `asked` not to.

    model_path: A folder, or the name of a model on a hub, of which `revision` is asked for the small files that tell.

    Raises LaunchError when it was asked to and cannot, and when `model_path` is neither.
    """
    if asked is False:
        return False
    folder = Path(model_path) if Path(model_path).is_dir() else _from_hub(model_path, revision)
    if not _has_vision(folder):
        why = "has no vision weights"
    elif not (folder / SETTINGS_FILE).is_file():
        why = f"has no {SETTINGS_FILE}, which says how images are prepared"
        if asked is None:
            _log.warning("%s %s: it is served without images", model_path, why)
    else:
        return True
    if asked:
        raise LaunchError(f"--enable-multimodal with --model-impl {IMPL}: {model_path} {why}")
    return False


def _from_hub(name: str, revision: str | None) -> Path:
    """Where the files of a hub's model lie once they have been downloaded: those that say what its weights are."""
    from huggingface_hub import snapshot_download

    def folder_of(*files: str) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files)))

    try:
        folder = folder_of("config.json", "*.safetensors.index.json", SETTINGS_FILE)
        # Weights in one file have no index, and have to be downloaded anyway.
        return folder if any(folder.glob("*.index.json")) else folder_of("config.json", SETTINGS_FILE, "*.safetensors")
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"--model-path {name} is not a folder on this machine, and cannot be had from the hub: {error}"
        ) from error


def _has_vision(folder: Path) -> bool:
    if not has_weights(folder):
        return False  # a config alone, for a load with dummy weights
    index = folder / "model.safetensors.index.json"
    try:
        names: Iterable[str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError):  # whatever is wrong with it is said when the weights are read
        names = Checkpoint.open(folder).entries
    return any(name.startswith(VISION_PREFIXES) for name in names)


def register_processors(config_class: type) -> None:
    """Let transformers' Auto classes find our tokenizer and processor where a folder names them."""
    from kimi_k3_npu.engines.processing import register_auto_classes

    register_auto_classes(config_class)


def embeddings(
    model: nn.Module, network: KimiK3ForCausalLM, input_ids: Tensor, batch: Any, counts: Sequence[int]
) -> Tensor:
    """Rows [T, H] of a batch that has images: SGLang's own bookkeeping of which parts of which images are in it."""
    return engine.prepare_mm_inputs(input_ids, batch, _TextModel(network, counts), {}, model)


def features(network: KimiK3ForCausalLM, items: Sequence[Any]) -> Tensor:
    """The rows of images end to end, as `get_image_feature` has to give them."""
    tower, projector = network.vision_tower, network.mm_projector
    assert tower is not None
    assert projector is not None
    data = [item.model_specific_data for item in items]
    grids = torch.cat([each["image_grid_thw"] if "image_grid_thw" in each else each["grid_thws"] for each in data])
    pixels = torch.cat([item.feature.to(projector.device) for item in items])
    group = network.mesh.attn_tp if engine.get_mm().mm_enable_dp_encoder else None
    return image_features(tower, projector, pixels, [(t, rows, columns) for t, rows, columns in grids.tolist()], group)


class _TextModel:
    """What SGLang asks of a language model when it only wants embeddings."""

    def __init__(self, network: KimiK3ForCausalLM, counts: Sequence[int]) -> None:
        self._network, self._counts = network, counts

    def get_input_embeddings(self) -> _TextModel:
        return self

    @property
    def num_embeddings(self) -> int:
        return self._network.config.text.vocab_size

    def __call__(self, ids: Tensor) -> Tensor:
        return self._network.embed(ids, self._counts)
