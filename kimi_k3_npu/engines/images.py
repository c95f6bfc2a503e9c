"""Images in an engine: whether a launch takes them, and the rows of the prompt that they become."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from kimi_k3_npu.checkpoint.folder import has_weights
from kimi_k3_npu.checkpoint.load import VISION_PREFIXES
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.engines.launch import IMPL, Engine
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.images import SETTINGS_FILE
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.vision import image_features

_log = logging.getLogger(__name__)


def wanted(engine: Engine, model: str, asked: bool | None, revision: str | None = None) -> bool:
    """Whether a launch of `engine` takes images: if and only if its model has vision weights, unless `asked` not to.

    model: A folder, or the name of a model on a hub, of which `revision` is asked for the small files that tell.

    Raises LaunchError when it was asked to and cannot, and when `model` is neither.
    """
    if asked is False:
        return False
    folder = Path(model) if Path(model).is_dir() else _from_hub(engine, model, revision)
    if not _has_vision(folder):
        why = "has no vision weights"
    elif not (folder / SETTINGS_FILE).is_file():
        why = f"has no {SETTINGS_FILE}, which says how images are prepared"
        if asked is None:
            _log.warning("%s %s: it is served without images", model, why)
    else:
        return True
    if asked:
        raise LaunchError(f"{engine.images_option} with --model-impl {IMPL}: {model} {why}")
    return False


def _from_hub(engine: Engine, name: str, revision: str | None) -> Path:
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
            f"{engine.model_option} {name} is not a folder on this machine, and cannot be had from the hub: {error}"
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


def features(network: KimiK3ForCausalLM, pixels: Sequence[Tensor], grids: Tensor, *, split: bool) -> Tensor:
    """The rows of images end to end: pixels of each [P, 3, p, p], grids [images, 3] -> [features, H].

    With `split`, each rank of an attention group runs the tower for its share of the images.
    """
    tower, projector = network.vision_tower, network.mm_projector
    assert tower is not None
    assert projector is not None
    patches = torch.cat([each.to(projector.device) for each in pixels])
    group = network.mesh.attn_tp if split else None
    return image_features(tower, projector, patches, [(t, rows, columns) for t, rows, columns in grids.tolist()], group)
