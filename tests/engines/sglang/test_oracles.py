"""Every text oracle through the real engine: alone, in one batch, and continued from the cache of states."""

from __future__ import annotations

from collections.abc import Callable
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
