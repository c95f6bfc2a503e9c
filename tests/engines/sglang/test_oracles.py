"""Every text oracle through the real engine: alone, in one batch, and continued from the cache of states."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.harness import GREEDY

CASES = [
    pytest.param("k3", {}, id="k3"),
    pytest.param("k3", {"chunked_prefill_size": 32}, id="k3-chunked"),
    pytest.param("k3", {"chunked_prefill_size": 32, "enable_mixed_chunk": True}, id="k3-mixed"),
    pytest.param("k3-deep", {}, id="k3-deep"),
    pytest.param("k3-router", {}, id="k3-router"),
    pytest.param("k3-mxfp4", {}, id="k3-mxfp4"),
    pytest.param("k3-w4a8", {}, id="k3-w4a8"),
    pytest.param("kimi-linear", {}, id="kimi-linear"),
    pytest.param("kimi-linear-flat", {}, id="kimi-linear-flat"),
]


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_tokens_equal_the_oracle(
    engine: Callable, oracle: Callable, prompts: Callable, name: str, arguments: dict[str, Any]
) -> None:
    asked, expected = prompts(name)
    with engine(model_path=str(oracle(name).folder), **arguments) as driver:
        check(driver, asked, expected)
        assert "type=KimiK3ForSGLang" in driver.log


def test_dummy_weights_need_only_a_config(engine: Callable, oracle: Callable, tmp_path: Path) -> None:
    """For measuring memory and speed; MXFP4 experts stay packed as they would be."""
    (tmp_path / "config.json").write_bytes((oracle("k3-mxfp4").folder / "config.json").read_bytes())
    with engine(model_path=str(tmp_path), load_format="dummy") as driver:
        (tokens,) = driver.greedy([[1, 2, 3]])
        assert len(tokens) == 8
        assert "read " not in driver.log


def test_a_model_of_a_hub(engine: Callable, oracle: Callable, prompts: Callable, tmp_path: Path) -> None:
    """The files are taken from where the hub's client keeps them, as SGLang takes them."""
    cached = tmp_path / "hub" / "models--someone--k3"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(oracle("k3").folder, cached / "snapshots" / ("0" * 40))
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with engine(env, model_path="someone/k3") as driver:
        asked, expected = prompts("k3")
        assert driver.greedy(asked) == expected


def check(driver: Any, asked: list[list[int]], expected: list[list[int]]) -> None:
    """Alone, three of each in one batch, and the second half of the answer continued from the first."""
    for prompt, tokens in zip(asked, expected, strict=True):
        assert driver.greedy([prompt]) == [tokens], f"prompt of {len(prompt)} tokens, alone"
    assert driver.greedy(3 * asked) == 3 * expected, "three of each in one batch"
    for prompt, tokens in zip(asked, expected, strict=True):
        request = {"input_ids": prompt + tokens[:4], "sampling_params": {**GREEDY, "max_new_tokens": 4}}
        (result,) = driver.generate([request])
        assert result["output_ids"] == tokens[4:], f"continuation of a prompt of {len(prompt)} tokens"
        assert result["meta_info"]["cached_tokens"] >= len(prompt), "the continuation must come from the cache"
