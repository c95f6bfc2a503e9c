"""Every malformed checkpoint is refused by name, or warned of, or caught by checksums; on one rank and on four."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kimi_k3_npu import load_model
from kimi_k3_npu.checkpoint.checksums import Checksums
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.errors import CheckpointError, KimiK3Error
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.resources import resource_path
from tests.checkpoint.corpus import ORACLES, Case, Draft, cases, table

CASES = cases()
FOUR = ParallelLayout(tp=4, ep=4)

refused, warned, unseen = (
    pytest.mark.parametrize("case", [case for case in CASES if case.outcome == outcome], ids=lambda case: case.name)
    for outcome in ("refused", "warned", "checksum")
)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Case], Path]:
    def write(case: Case) -> Path:
        draft = Draft(case.oracle)
        case.change(draft)
        draft.write(tmp_path)
        return tmp_path

    return write


def message(load: Callable[[], object]) -> str:
    """What a load is refused with; empty if it is not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            load()
        except KimiK3Error as error:
            return str(error)
    return ""


def assert_names(words: tuple[str, ...], text: str) -> None:
    for word in words:
        assert word in text


@refused
def test_refused(case: Case, written: Callable[[Case], Path]) -> None:
    folder = written(case)
    assert_names(case.words, message(lambda: load_model(folder)))
    ranks = (message(lambda rank=rank: load_model(folder, layout=FOUR, rank=rank)) for rank in range(4))  # type: ignore[misc]
    assert_names(case.words, next(filter(None, ranks), ""))
    assert_names(case.words, str(CheckpointError.from_faults(folder, verify(folder).faults)))


@warned
def test_warned(case: Case, written: Callable[[Case], Path]) -> None:
    folder = written(case)
    for options in ({}, {"layout": FOUR, "rank": 1}):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_model(folder, **options)
        assert_names(case.words, "\n".join(str(warning.message) for warning in caught))
    found = verify(folder)
    assert not found.faults
    assert_names(case.words[-1:], "\n".join(f"{note.kind}: {note.name}: {note.detail}" for note in found.notes))


@cache
def published(oracle: str) -> Checksums:
    return Checksums.of(ORACLES / oracle)


@unseen
def test_only_checksums_show_it(
    case: Case, written: Callable[[Case], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = written(case)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(folder)
        load_model(folder, layout=FOUR, rank=3)
    assert not verify(folder).faults
    manifest = tmp_path_factory.mktemp("manifest") / "checksums.json"
    published(case.oracle).write(manifest)
    found = verify(folder, against=manifest).faults
    assert {fault.kind for fault in found} <= {"differs from the manifest", "config differs from the manifest"}
    assert_names(case.words, str(CheckpointError.from_faults(folder, found)))


def test_the_corpus_is_the_documented_one() -> None:
    assert len(CASES) >= 80
    assert {case.oracle for case in CASES} >= {"k3", "k3-mxfp4", "k3-w4a8"}
    documented = resource_path("docs", "checkpoints.md").read_text(encoding="utf-8")
    assert f"{len(CASES)} checkpoints" in documented
    assert table() in documented
