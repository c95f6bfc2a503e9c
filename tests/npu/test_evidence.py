"""docs/evidence.md: what it says is what these tests show. Its test runs after all others of this folder."""

from __future__ import annotations

import pytest
import torch

from kimi_k3_npu.ops.norm import rms_norm_npu
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
    key = ("rms_norm", "composed")
    before = {level: set(where) for level, where in recorder.shown[key].items()}
    rms_norm_npu(torch.ones(2, 4), torch.ones(4), 1e-5)
    recorder.drop()
    assert recorder.shown[key] == before


def test_every_kernel_has_computed_something(recorder: Recorder):
    """Also the ones that compose basic operators: they are what runs where a limit refuses the others."""
    if not recorder.is_whole_suite:
        pytest.skip(PARTIAL)
    kernels = {(op, kernel) for op, kernels in recorder.kernels().items() for kernel in kernels}
    assert {kernel for kernel in kernels if max(recorder.shown[kernel], default=0) < NUMBERS} == set()


def test_the_page_says_what_the_tests_show(recorder: Recorder):
    if not recorder.is_whole_suite:
        pytest.skip(PARTIAL)
    assert PAGE.read_text(encoding="utf-8") == recorder.page(), "run `python -m tests.npu.evidence`"
