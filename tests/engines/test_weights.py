"""The checkpoint of a launch, for any engine: its published config, where its files lie, how experts are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_k3_npu import envs
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines.weights import Source, expert_weights, folder_of, published_config
from kimi_k3_npu.errors import LaunchError


def test_changes_are_laid_over_the_published_config(oracle: Callable) -> None:
    """One key of a mapping leaves its other keys alone."""
    folder = str(oracle("k3").folder)
    assert published_config(folder, None, {}) == KimiK3Config.from_pretrained(folder)
    raw = json.loads((Path(folder) / "config.json").read_text())["text_config"]
    changed = published_config(folder, None, {"text_config": {"rms_norm_eps": 0.25}})
    assert changed.text.rms_norm_eps == 0.25
    assert changed.text.hidden_size == raw["hidden_size"]


def test_a_folder_or_a_name_is_what_the_engine_downloads(tmp_path: Path) -> None:
    asked = []

    def download(model: str) -> str:
        asked.append(model)
        return str(tmp_path / "cache")

    for model in (str(tmp_path), "owner/Kimi-K3"):
        assert folder_of(model, "Motor", download) == tmp_path / "cache"
    assert asked == [str(tmp_path), "owner/Kimi-K3"]


@pytest.mark.parametrize("model", ["/weights/mistyped", "./owner/name", "a/b/c", "Kimi-K3"])
def test_what_is_neither_is_not_asked_for(model: str) -> None:
    with pytest.raises(LaunchError, match="is not a folder on this machine, nor the name of a model on a hub"):
        folder_of(model, "Motor", lambda model: pytest.fail(f"downloads {model}"))


def test_what_the_hub_says_is_handed_on() -> None:
    def download(model: str) -> str:
        raise OSError("401 for you")

    with pytest.raises(LaunchError, match=r"^owner/name: Motor's loader finds no weights there: 401 for you$"):
        folder_of("owner/name", "Motor", download)


def test_how_experts_are_kept_comes_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(envs.SGLANG_EXPERT_WEIGHTS, raising=False)
    assert expert_weights(envs.SGLANG_EXPERT_WEIGHTS) == "auto"
    monkeypatch.setenv(envs.SGLANG_EXPERT_WEIGHTS, "bf16")
    assert expert_weights(envs.SGLANG_EXPERT_WEIGHTS) == "bf16"
    monkeypatch.setenv(envs.SGLANG_EXPERT_WEIGHTS, "fp8")
    with pytest.raises(LaunchError, match="EXPERT_WEIGHTS='fp8' is not a choice"):
        expert_weights(envs.SGLANG_EXPERT_WEIGHTS)


def test_dummy_weights_are_kept_as_the_config_says(oracle: Callable, tmp_path: Path) -> None:
    """As the stored ones would be."""
    for name in ("k3", "k3-mxfp4"):
        folder = oracle(name).folder
        config = KimiK3Config.from_pretrained(folder)
        for choice in ("auto", "bf16"):
            assert Source.of_config(tmp_path, config, choice).experts == Source.open(folder, config, choice).experts
