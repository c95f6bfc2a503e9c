"""Which NPU kernel was run how, recorded while the tests of this folder run; written to docs/evidence.md.

    .venv-npu/bin/python -m tests.npu.evidence

runs them all and writes the page. On a machine with an NPU it runs the self-test too, which is the highest level.
"""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence.md"
PAGE_TESTS, PAGE_TEST = "test_evidence.py", "test_the_page_says_what_the_tests_show"
NAME = "evidence"

#: What is chosen as kernels are and is no operator of torch.
DISPATCH = (("moe_dispatch", "mc2"), ("moe_dispatch", "alltoall"))
#: Tests that compare the numbers of a kernel in processes of their own, where they check themselves that it ran.
IN_OTHER_PROCESSES = {"test_every_layout_gives_the_oracles_logits": ("moe_dispatch", "mc2")}

SCHEMA, NUMBERS, LOWERED, DEVICE = 1, 2, 3, 4
LEVELS = {
    0: "none",
    SCHEMA: "a call on tensors without memory passed torch_npu's own schema and shape function",
    NUMBERS: "its numbers were compared on emulated operators, which enforce the documented limits",
    LOWERED: "the Ascend compiler lowered it",
    DEVICE: "it ran on a device, and the numbers were compared",
}

HEAD = """# What is known about each NPU kernel

Written by `python -m tests.npu.evidence` from what passing tests of tests/npu launched; a test fails when it is out of
date. The level of a kernel is the highest that it has reached:

{levels}

n/a: the kernel is the operator's reference, made of basic operators: there is nothing to hold it against.

Kernels `sgl_*` and `batch_matmul_transpose` are of the package sgl_kernel_npu. Its schemas and limits were written down
from its source, so levels 1 and 2 hold these kernels against our reading of it, not against the package.

## In SGLang

tests/engines/sglang makes the calls of SGLang 0.5.23's Ascend backend through the engine's own layers, to a stand-in
that takes the same tensors and computes on a CPU, and compares the tokens. It watches decode passes for what a captured
graph cannot replay. What that leaves unproven:

- the Ascend backend's kernels themselves: its paged MLA attention, its KDA decode and prefill, and the layouts of its
  pools beyond the shapes and dtypes that were read from its source;
- graph capture and replay on a device, and with it the fixed batch sizes of captured graphs;
- the package deep_ep: its dispatcher is driven against a stand-in with the signatures that SGLang calls;
- hccl: groups are gloo's here;
- memory: how much SGLang leaves to the pools next to the full-size weights.

## Kernels

| operator | kernel | level | schema and shapes | numbers | device |
|---|---|---|---|---|---|
"""


class Recorder:
    """A pytest plugin that notes which kernels each passing test launched, on which kind of tensor.

    It wraps the kernels as they are registered, so it must be made before any module of operators is imported.
    """

    def __init__(self) -> None:
        from kimi_k3_npu.ops import op

        #: (operator, kernel) -> level -> where it was shown.
        self.shown: dict[tuple[str, str], dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.is_whole_suite, self._some_left_out = False, False
        self._launched: list[tuple[str, str, int]] = []
        add, run = op.Op.add, op.Choice.run
        bare: dict[Callable, Callable] = {}

        def add_recorded(operator: Any, kernel: Any) -> None:
            launch = bare.get(kernel.launch, kernel.launch)  # two operators may share a function
            recorded = self._recorded(operator.name, kernel.name, launch)
            bare[recorded] = launch
            add(operator, replace(kernel, launch=recorded))

        def run_noted(choice: Any, *arguments: Any) -> Any:
            """The dispatch of experts is chosen as kernels are, but is no operator of torch."""
            if choice.op in op.OPS:
                return run(choice, *arguments)
            return self._recorded(choice.op, choice.name, partial(run, choice))(*arguments)

        assert not op.OPS, f"{sorted(op.OPS)} were declared before their kernels could be wrapped"
        op.Op.add, op.Choice.run = add_recorded, run_noted

    def _recorded(self, op: str, kernel: str, launch: Callable) -> Callable:
        @functools.wraps(launch, updated=())
        def recorded(*arguments: Any, **options: Any) -> Any:
            result = launch(*arguments, **options)
            self._launched.append((op, kernel, level_of(arguments)))
            return result

        return recorded

    def keep(self, where: str) -> None:
        """What was launched since the last time stood the test."""
        for op, kernel, level in self._launched:
            self.shown[op, kernel][level].add(where)
        self._launched.clear()

    def drop(self) -> None:
        self._launched.clear()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """What has been shown is looked at last."""
        items.sort(key=lambda item: item.path.name == PAGE_TESTS)
        files = {item.path for item in items}
        self.is_whole_suite = files >= set(Path(__file__).parent.glob("test_*.py")) and not self._some_left_out

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Whole matrices show what their samples do."""
        self._some_left_out |= not all(item.get_closest_marker("full") for item in items)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.when == "call":
            # What a property test tries differs from run to run, and the page must not.
            is_random = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
            self.keep(item.path.stem) if report.passed and not is_random else self.drop()
            name = getattr(item, "originalname", None)
            if report.passed and name in IN_OTHER_PROCESSES:
                self.shown[IN_OTHER_PROCESSES[name]][NUMBERS].add(item.path.stem)
        return report

    def page(self) -> str:
        levels = "\n".join(f"{level}. {meaning}" for level, meaning in LEVELS.items())
        return HEAD.format(levels=levels) + "".join(f"{row}\n" for row in self.rows())

    def kernels(self) -> Iterator[tuple[str, str, bool]]:
        """Operator, kernel, and whether the kernel is the operator's reference, which cannot differ from itself."""
        from kimi_k3_npu.ops.op import npu_operators

        rows = [
            (name, kernel.name, kernel.launch is op.reference)
            for name, op in npu_operators().items()
            for kernel in op.kernels
        ]
        yield from sorted([*rows, *((*kernel, False) for kernel in DISPATCH)], key=lambda row: row[0])

    def rows(self) -> Iterator[str]:
        for op, kernel, is_reference in self.kernels():
            shown = {} if is_reference else self.shown.get((op, kernel), {})
            where = (", ".join(sorted(shown.get(level, ()))) for level in (SCHEMA, NUMBERS, DEVICE))
            yield f"| {op} | {kernel} | {'n/a' if is_reference else max(shown, default=0)} | {' | '.join(where)} |"


def level_of(arguments: Sequence[Any]) -> int:
    """What a call with these arguments can show."""
    from torch import Tensor
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_leaves

    level = NUMBERS
    for tensor in tree_leaves(list(arguments)):
        if isinstance(tensor, FakeTensor) or (isinstance(tensor, Tensor) and tensor.is_meta):
            return SCHEMA
        if isinstance(tensor, Tensor) and tensor.device.type == "npu":
            level = DEVICE
    return level


class Writer:
    """A pytest plugin that writes the page when all tests have passed, after the self-test where there is an NPU."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.testsfailed:
            return
        recorder = session.config.pluginmanager.get_plugin(NAME)
        on_device(recorder)
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(recorder.page(), encoding="utf-8")
        print(f"\nwrote {PAGE}")


def on_device(recorder: Recorder) -> None:
    from kimi_k3_npu.cli import selftest
    from kimi_k3_npu.ops.device import current

    if selftest.npu_is_here():
        for result in selftest.run(selftest.Machine(current(), "npu"), [16, 1024], attn_tp=16):
            print(result)
            recorder.drop() if result.problem else recorder.keep("selftest")


if __name__ == "__main__":
    here = Path(__file__).parent
    without_page = f"--deselect=tests/npu/{PAGE_TESTS}::{PAGE_TEST}"
    sys.exit(pytest.main(["-q", "-m", "not full", str(here), without_page], [Writer()]))
