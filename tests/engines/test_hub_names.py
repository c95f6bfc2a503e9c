"""`--model-path` as the name of a model on a hub, in SGLang: whether such a launch takes images."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from kimi_k3_npu.engines.sglang.images import wanted
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.images import SETTINGS_FILE

NAME = "owner/Kimi-K3"
TEXT = {"language_model.model.norm.weight": "model-00001-of-00001.safetensors"}
VISION = {**TEXT, "mm_projector.pre_norm.weight": "model-00001-of-00001.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What has been downloaded of NAME's main revision; nothing else can be had."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached, commit = tmp_path / f"models--{NAME.replace('/', '--')}", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    snapshot = cached / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def fill(snapshot: Path, weights: dict[str, str], *, settings: bool = True) -> None:
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    if settings:
        (snapshot / SETTINGS_FILE).write_text("{}")


def test_images_are_taken_as_from_a_folder(hub: Path) -> None:
    fill(hub, VISION)
    assert wanted(NAME, None) is True
    assert wanted(NAME, True) is True
    assert wanted(NAME, False) is False


def test_a_text_model_takes_none(hub: Path) -> None:
    fill(hub, TEXT)
    assert wanted(NAME, None) is False
    with pytest.raises(LaunchError, match=f"{NAME} has no vision weights"):
        wanted(NAME, True)


def test_images_are_never_switched_off_in_silence(hub: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(hub, VISION, settings=False)
    with caplog.at_level(logging.WARNING):
        assert wanted(NAME, None) is False
    assert f"{NAME} has no {SETTINGS_FILE}" in caplog.text
    assert "served without images" in caplog.text


@pytest.mark.parametrize("name", ["owner/other", "/weights/mistyped", "a/b/c"])
@pytest.mark.parametrize("asked", [None, True])
def test_what_is_neither_a_folder_nor_on_the_hub_is_refused(hub: Path, name: str, asked: bool | None) -> None:
    with pytest.raises(LaunchError, match=f"--model-path {name} is not a folder on this machine, and cannot be had"):
        wanted(name, asked)
    assert wanted(name, False) is False
