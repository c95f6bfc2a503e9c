"""The calls of SGLang's NPU backend, made through the engine's own layers to a stand-in that computes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.sglang.test_oracles import check


@pytest.mark.parametrize("name", ["k3", "kimi-linear"])
def test_tokens_equal_the_oracle(
    engine: Callable, oracle: Callable, prompts: Callable, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Prefill expands and writes the cache itself, in chunks that find a cached prefix; decode absorbs.

    Decode passes are watched: a captured graph replays operators and not Python, so nothing in them may hand a
    tensor's value to Python or have a result whose shape depends on one. The routed experts are replaced by some with
    static shapes: the CPU's reference looks at the router's choices, the NPU's grouped kernels do not.
    """
    report = tmp_path_factory.getbasetemp() / "watched.json"
    arguments = {"model_path": str(oracle(name).folder), "attention_backend": "ascend", "chunked_prefill_size": 32}
    with engine({"TEST_WATCH_DECODE": str(report)}, **arguments) as driver:
        check(driver, *prompts(name))
        assert "Ascend attention" in driver.log
    watched = json.loads(Path(report).read_text())
    assert watched["passes"] >= 20
    assert watched["operators"] > 100 * watched["passes"]
    assert watched["found"] == []
