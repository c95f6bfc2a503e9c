"""What the tests of the SGLang plugin share: engines, and what the oracles expect of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.harness import ARGUMENTS, Driver, EngineFailed, environment, free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.sglang)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`with engine(model_path=..., tp_size=2) as driver:` starts an engine; one process serves all of a module."""
    drivers: dict[tuple, Driver] = {}

    @contextmanager
    def start(env: dict[str, str] | None = None, **arguments: Any) -> Iterator[Driver]:
        key = tuple(sorted((env or {}).items()))
        if key not in drivers:
            drivers[key] = Driver(tmp_path_factory.mktemp("engine"), environment(**(env or {})))
        driver = drivers[key]
        try:
            # Sockets of an engine that has been stopped stay bound, so each has a port of its own.
            driver.start(**{**ARGUMENTS, "port": free_port(), **arguments})
            yield driver
            driver("stop")
        except EngineFailed:
            del drivers[key]
            raise

    yield start
    for driver in drivers.values():
        driver.close()


@pytest.fixture
def prompts(oracle: Callable[[str], Any]) -> Callable[[str], tuple[list[list[int]], list[list[int]]]]:
    """Of an oracle: its prompts, and the 8 tokens that follow each."""

    def find(name: str) -> tuple[list[list[int]], list[list[int]]]:
        expected = oracle(name).expected
        return [p.tolist() for p in expected.prompts], [g.tolist() for g in expected.greedy8]

    return find
