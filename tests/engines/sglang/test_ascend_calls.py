"""The calls of SGLang's NPU backend, made through the engine's own layers to a stand-in that computes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines.sglang.test_oracles import check


def test_the_watch_sees_what_a_graph_cannot_replay() -> None:
    import torch
    from kimi_k3_npu_test_cpu_platform.watch import Watch

    x, mask = torch.arange(4.0), torch.tensor([True, False, True, False])
    for name, act in {
        "aten::_local_scalar_dense": lambda: x.sum().item(),
        "aten::is_nonzero": lambda: bool(x[0] > 0),
        "Tensor.tolist": lambda: x.tolist(),
        "aten::nonzero": lambda: x.nonzero(),
        "aten::index with a mask": lambda: x[mask],
        "aten::bincount": lambda: torch.bincount(x.long()),
    }.items():
        with Watch() as watch:
            act()
        assert watch.found & {name, "aten::_local_scalar_dense"}, name
    with Watch() as watch:
        x.index_add(0, torch.tensor([1, 1]), x[:2]).softmax(0).masked_fill(mask, 0.0)
    assert not watch.found


def test_low_latency_rows_find_their_experts_without_the_host() -> None:
    """As SGLang's DeepEP dispatcher delivers them: sorted by local expert, with rows to spare at the end."""
    import torch
    from kimi_k3_npu_test_cpu_platform.watch import Watch

    from kimi_k3_npu.ops.grouped import owners

    with Watch() as watch:
        found = owners(torch.tensor([2, 0, 3, 0], dtype=torch.int32), 8, first=8)
    assert not watch.found
    assert found.flatten().tolist() == [8, 8, 10, 10, 10, 12, 12, 12]


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
    assert watched["passes"] >= 15
    assert watched["operators"] > 100 * watched["passes"]
    assert watched["found"] == []
