"""docs/evidence.md: what it says is what these tests show. Its test runs after all others of this folder."""

from __future__ import annotations

import pytest
import torch

from kimi_k3_npu.ops.situ import situ_and_mul
from tests.npu.evidence import NAME, NUMBERS, PAGE, SCHEMA, Recorder, level_of

PARTIAL = "only a run of all of tests/npu can tell"


@pytest.fixture
def recorder(pytestconfig: pytest.Config) -> Recorder:
    return pytestconfig.pluginmanager.get_plugin(NAME)


def test_the_level_of_a_call_is_told_by_its_tensors():
    meta, cpu = torch.empty(2, device="meta"), torch.empty(2)
    assert level_of((meta, 3)) == SCHEMA
    assert level_of(([cpu, cpu], 3)) == NUMBERS
    assert level_of((cpu, [meta])) == SCHEMA


def test_only_kernels_of_passing_tests_count(recorder: Recorder):
    key = ("situ_and_mul", "composed")
    before = {level: set(where) for level, where in recorder.shown[key].items()}
    situ_and_mul.npu(torch.ones(2, 4), 4.0, None)
    recorder.drop()
    assert recorder.shown[key] == before


def test_every_kernel_has_computed_something(recorder: Recorder):
    """Also those that compose basic operators otherwise than the reference does."""
    if not recorder.is_whole_suite:
        pytest.skip(PARTIAL)
    kernels = {(op, kernel) for op, kernel, is_reference in recorder.kernels() if not is_reference}
    assert {kernel for kernel in kernels if max(recorder.shown[kernel], default=0) < NUMBERS} == set()


def test_the_page_says_what_the_tests_show(recorder: Recorder):
    if not recorder.is_whole_suite:
        pytest.skip(PARTIAL)
    assert PAGE.read_text(encoding="utf-8") == recorder.page(), "run `python -m tests.npu.evidence`"
