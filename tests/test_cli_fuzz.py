"""Nonsense for every option of every command: a message and an exit code, never a traceback, never success."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperArgument, TyperOption

from kimi_k3_npu.cli import app as program
from kimi_k3_npu.cli import main
from kimi_k3_npu.errors import KimiK3Error

CALLS, REAL_CALLS, SECONDS = 2000, 50, 60
#: Values of any option, whatever it takes.
TEXTS = ("", " ", "abc", "-1", "0", "1", "9" * 400, "1e400", "nan", "-inf", "0x10", "None", "[", "{", "a=b", "a=[", "=")
TEXTS += ("tp=0", "tp=x,dp=", "tp=64,tp=64", "é漢\u202e", "\udce9\udcff", "no/such/file", "--json", "\n", "tp-size=abc")
TEXTS += ("interface=", "HCCL_BUFFSIZE=x", "http://", "http://[", "1,,2", "²", "sglang-a3-4node", "a3", "npu:x", ".")
NOT_NUMBERS = ("", "abc", "nan", "1e400", "9" * 400, "[", "None", "\udce9", "é", "1,2")


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not (children := getattr(command, "commands", {})):
        yield path, command
    for name, child in children.items():
        yield from leaves(child, (*path, name))


LEAVES = list(leaves(program.command_tree()))


def is_choice(option: TyperOption) -> bool:
    return "|" in str(option.display_type(None))  # type: ignore[arg-type]


def words(random_: random.Random, path: tuple[str, ...], command: Any) -> tuple[list[str], bool]:
    """A command line, and whether one of its values is certainly wrong."""
    found, wrong = list(path), False
    for param in command.params:
        if isinstance(param, TyperArgument):
            if random_.random() < 0.9:
                found += ["--", random_.choice(TEXTS)][random_.random() < 0.8 :]
            continue
        if random_.random() > (0.9 if param.required else 0.25):
            continue
        for _ in range(random_.choice((1, 1, 1, 2))):
            if param.is_flag:
                found.append(random_.choice([*param.opts, *param.secondary_opts]))
                continue
            number = param.min is not None or param.max is not None
            bad = number and random_.random() < 0.5
            value = random_.choice(NOT_NUMBERS if bad else TEXTS)
            found.append(f"{param.opts[0]}={value}")
            last_wins = not param.multiple
            wrong = (wrong and not last_wins) or bad or wrong
    return found, wrong and "--" not in found


def outcome(args: list[str]) -> int:
    """The exit code. Anything but an exit is a fault, and names the command line that made it."""
    started = time.perf_counter()
    try:
        main(args)
    except SystemExit as end:
        code = 0 if end.code is None else int(end.code)
    except BaseException as error:
        raise AssertionError(f"{args} ends in {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{args} does not exit")
    assert time.perf_counter() - started < SECONDS, args
    return code


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What takes long or writes is refused after the options have been read."""

    def refuse(*_: object, **__: object) -> Any:
        raise KimiK3Error("not in this test")

    for name in (
        "kimi_k3_npu.cli.plan._report",
        "kimi_k3_npu.cli.plan._search",
        "kimi_k3_npu.cli.recipe.check",
        "kimi_k3_npu.cli.generation.load_network",
        "kimi_k3_npu.cli.selftest._no_torch_npu",
        "kimi_k3_npu.engines.offline.open_engine",
        "kimi_k3_npu.engines.sglang.installation.examine",
        "kimi_k3_npu.evaluation.answers.ServerAnswers",
        "kimi_k3_npu.plan.choices.layer_kernels",
        "kimi_k3_npu.plan.weights.rank_weights",
        "kimi_k3_npu.tiny.write_tiny",
    ):
        monkeypatch.setattr(name, refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nonsense(stubbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_ = random.Random(14)
    started = time.perf_counter()
    codes: dict[int, int] = {}
    for call in range(CALLS):
        path, command = LEAVES[call % len(LEAVES)]
        args, wrong = words(random_, path, command)
        code = outcome(args)
        codes[code] = codes.get(code, 0) + 1
        assert code in (0, 1, 2), args
        assert not (wrong and code == 0), args
        assert "Traceback" not in "".join(capsys.readouterr()), args
    assert codes[2] > CALLS // 4
    assert time.perf_counter() - started < 10 * SECONDS  # far more than it takes, on a machine that is busy


def test_nonsense_with_nothing_stubbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that answer without a model, each with one value that is wrong."""
    monkeypatch.chdir(tmp_path)
    bare = ("layout", "kernels", "plan", "info", "generate", "batch", "recipe show", "recipe render", "weights verify")
    chosen = [(path, command) for path, command in LEAVES if " ".join(path) in bare]
    options = [
        (path, option) for path, command in chosen for option in command.params if isinstance(option, TyperOption)
    ]
    wrong = [(path, option) for path, option in options if option.min is not None or is_choice(option)]
    random_ = random.Random(50)
    for path, option in random_.choices(wrong, k=REAL_CALLS):
        args = [*path, f"{option.opts[0]}={random_.choice(NOT_NUMBERS)}"]
        assert outcome(args) == 2, args
        assert "Traceback" not in "".join(capsys.readouterr()), args


@pytest.mark.parametrize(
    "args",
    [
        "weights convert a b --to bf16 --device tpu",
        "weights convert a b --to bf16 --device npu:x",
        "eval gsm --engine tgi --model m",
        "eval gsm --engine server --model m",
        "batch --model m --prompts p --out o --engine tgi",
        "batch --model m --prompts p --out o --engine-arg a=[",
        "batch --model m --prompts p --out o --engine-arg 1a=2",
        "batch --model m --prompts p --out o --engine-arg a=1 --engine-arg a=2",
        "plan --search --nodes 4 --concurrency 0",
        "plan --search --nodes 4 --concurrency 99999999999999999999",
        "plan --layout tp=16 --memory-tbps nan",
        "plan --layout tp=16 --memory-tbps -1",
        "plan --layout tp=16 --memory-gib inf",
        "layout --tp 99999999999999999999",
        "kernels --attn-tp 16 --tokens 99999999999999999999999",
        "kernels --attn-tp 16 --tokens ²",
    ],
)
def test_bad_values(args: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused while the command line is read: nothing is imported or opened for it."""
    started = time.process_time()
    assert outcome(args.split()) == 2
    assert time.process_time() - started < 1
    assert capsys.readouterr().err


def test_a_layout_of_more_ranks_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["plan", "--layout", "tp=99999999999999999999"]) == 1
    assert "tp = 99999999999999999999, must be at most 65536" in capsys.readouterr().err


@pytest.mark.parametrize("path", [path for path, _ in LEAVES], ids=" ".join)
def test_flags_show_no_type(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome([*path, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--help" in shown
    assert "bool" not in shown
