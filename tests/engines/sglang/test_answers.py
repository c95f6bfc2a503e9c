"""The trained checkpoint over the HTTP server, on one rank and on two: the answers of the transformers path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.evaluation.gsm import read_marked
from kimi_k3_npu.resources import resource_path
from tests.engines.sglang.harness import ARGUMENTS, Server, as_options

TINY = resource_path("weights", "tiny", "model")
ASKED = 100


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The file of answers to the first of the unseen problems, told to think as servers tell it."""
    folder = tmp_path_factory.mktemp("answers")

    def evaluate(name: str, *arguments: object) -> Path:
        out = folder / name
        assert run("eval", "gsm", "--limit", ASKED, "--effort", "max", "--out", out, *arguments) == 0
        return out

    return evaluate


@pytest.fixture(scope="module")
def expected(evaluate: Callable) -> Path:
    return evaluate("transformers", "--model", TINY, "--batch-size", ASKED, "--engine-arg", "dtype=float32")


@pytest.fixture(
    scope="module",
    params=[({}, {}), ({"tp_size": 2}, {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"})],
    ids=["one rank", "two ranks"],
)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments, env = request.param
    given: dict[str, Any] = {
        **ARGUMENTS,
        "model_path": TINY,
        "skip_tokenizer_init": False,
        "context_length": 2048,
        "max_total_tokens": 16384,
        "skip_server_warmup": True,
        "reasoning_parser": "kimi_k3",
        **arguments,
    }
    server = Server(tmp_path_factory.mktemp("server"), *as_options(given), **env)
    try:
        server.wait()
        yield server
    finally:
        server.close()


def test_the_same_answers(server: Server, expected: Path, evaluate: Callable) -> None:
    found = evaluate("server", "--engine", server.url)
    assert run("eval", "compare", expected, found, "--at-most", 1) == 0
    marked = read_marked(found)
    assert sum(one.right for one in marked) >= 0.95 * ASKED
    assert all(one.thinking and one.finished for one in marked)
