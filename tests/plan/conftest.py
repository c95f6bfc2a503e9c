"""The published configuration, and the launches that the tests change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.plan.checks import check_launch
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.launch import example_inputs, resolve
from kimi_k3_npu.recipes.reader import load_recipe

Changed = Callable[..., Subject]


@pytest.fixture(scope="session")
def full() -> KimiK3Config:
    return published_config()


@pytest.fixture
def subject(full: KimiK3Config) -> Changed:
    """One process of a recipe with some settings changed, as `--set` does."""

    def subject(name: str, role: str = "", *, deep: bool = False, **changes: str) -> Subject:
        recipe = load_recipe(name)
        given = {key if key.isupper() else key.replace("_", "-"): value for key, value in changes.items()}
        inputs = {"node_addr": "10.0.0.2", **example_inputs(recipe), **given}
        return Subject(resolve(recipe, role or recipe.serving_roles[0].name, 0, inputs), full, deep=deep)

    return subject


@pytest.fixture
def findings(subject: Changed) -> Callable[..., list[Finding]]:
    return lambda *args, **changes: check_launch(subject(*args, **changes))
