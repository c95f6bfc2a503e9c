"""`selftest`: every NPU kernel against its reference, on an NPU or, in a source checkout, on emulated operators."""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import pkgutil
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import median
from typing import TYPE_CHECKING, Annotated, NoReturn
from unittest.mock import patch

import typer

from kimi_k3_npu.cli.kernels import parse_tokens
from kimi_k3_npu.cli.numbers import MOST_RANKS
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.resources import resource_path

if TYPE_CHECKING:
    from kimi_k3_npu.ops.cases import Case, Sizes
    from kimi_k3_npu.ops.device import Device

#: What the emulated operators pretend to be.
EMULATED_SOC, EMULATED_CANN = "a3", "9.1"
TIMED_RUNS = 5
CANNOT_RUN = 2
SHAPE_WIDTH = 44


@dataclass(frozen=True)
class Machine:
    """Where kernels run. Inside `kernels()` this package's operators dispatch to them for tensors in `place`."""

    device: Device
    place: str
    kernels: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class Result:
    """One kernel on one case; `seconds` on an NPU only. `problem` is empty when it passed."""

    op: str
    kernel: str
    shape: str
    error: float
    allowed: float
    seconds: float | None
    problem: str = ""

    def __str__(self) -> str:
        time = "-" if self.seconds is None else f"{1e3 * self.seconds:.3f} ms"
        verdict = f"FAIL: {self.problem}" if self.problem else "pass"
        kernel = f"{self.op:<24} {self.kernel:<32} {self.shape:<{SHAPE_WIDTH}}"
        return f"{kernel} error {self.error:7.1e} of {self.allowed:7.1e} {time:>12}  {verdict}"


def selftest(
    tokens: Annotated[str, typer.Option(metavar="N,N,...", help="Tokens of a step.")] = "16,1024",
    attn_tp: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="Ranks that share the attention heads.")] = 16,
    op: Annotated[str | None, typer.Option(help="Only this operator, such as v_up.", show_default="all")] = None,
) -> None:
    """Run every NPU kernel at Kimi-K3's sizes and compare it with its reference on the CPU.

    Needs an NPU. In a source checkout with torch_npu, kernels run on emulated operators instead, which is said.
    Exit code 1: a kernel is wrong. Exit code 2: there is nothing to run them on.
    """
    counts = parse_tokens(tokens)
    # torch would load torch_npu by itself, which fails where CANN is missing.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    if reason := _no_torch_npu():
        _give_up(reason)
    with ExitStack() as stack:
        if npu_is_here():
            from kimi_k3_npu.ops.device import current

            machine = Machine(current(), "npu")
            typer.echo(f"on this NPU: {machine.device.soc}, CANN {machine.device.cann}")
        elif reason := _no_emulation():
            _give_up(f"there is no NPU here, and {reason}")
        else:
            machine = stack.enter_context(emulation())
            typer.echo(
                "NO NPU HERE: on emulated operators and the CPU. This shows that kernels call the operators as "
                "documented and combine their results rightly; it does not show what a device computes, or how fast."
            )
        failures = 0
        for result in run(machine, counts, attn_tp, op):
            typer.echo(str(result))
            failures += bool(result.problem)
    typer.echo(f"{failures} failed" if failures else "all passed")
    raise typer.Exit(1 if failures else 0)


def run(machine: Machine, counts: list[int], attn_tp: int, only: str | None = None) -> Iterator[Result]:
    """Every case of every NPU kernel, for each number of tokens.

    Raises:
        LaunchError: No operator `only` has an NPU kernel.
    """
    import torch

    from kimi_k3_npu.config.published import published_config
    from kimi_k3_npu.ops.cases import CASES, Sizes
    from kimi_k3_npu.ops.op import npu_operators

    import_operators()
    names = list(npu_operators())
    if only is not None and only not in names:
        raise LaunchError(f"no operator {only!r} has an NPU kernel; those that have: {', '.join(names)}")
    config = published_config().text
    with torch.inference_mode():
        for T in counts:
            sizes = Sizes(config, T, attn_tp)
            for op in [only] if only else names:
                if op not in CASES:
                    yield Result(op, "", "", 0.0, 0.0, None, "has no case in kimi_k3_npu.ops.cases")
                for case in CASES.get(op, []):
                    yield from _try(case, sizes, machine)


def import_operators() -> None:
    """Import every module of operators, which registers their kernels."""
    from kimi_k3_npu import ops

    for module in pkgutil.iter_modules(ops.__path__):
        importlib.import_module(f"{ops.__name__}.{module.name}")


def _try(case: Case, sizes: Sizes, machine: Machine) -> Iterator[Result]:
    """The case by each kernel that can be made to take it, once each."""
    from torch import Tensor
    from torch.utils._pytree import tree_leaves, tree_map_only

    from kimi_k3_npu.ops.device import assume
    from kimi_k3_npu.ops.op import CHOSEN, OPS

    arguments = case.arguments(sizes)
    op = OPS[case.op]
    want = op.reference(*arguments)
    shapes = ["x".join(map(str, x.shape)) for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    shape = " ".join(shapes)[:SHAPE_WIDTH]
    done: set[str] = set()
    for way in _ways(case.op, arguments, machine, done):
        before = CHOSEN.copy()
        error, seconds, problem = math.inf, None, ""
        with assume(machine.device), way, machine.kernels():
            try:
                there = case.prepare(*tree_map_only(Tensor, lambda x: x.to(machine.place), arguments))
                error = case.error(op.npu(*there), want)
                if machine.place == "npu":
                    seconds = _seconds(op.npu, there)
            except Exception as failure:  # whatever a device says about a kernel is that kernel's result
                problem = f"{type(failure).__name__}: {failure}".splitlines()[0]
        name = next((name for ran, name in CHOSEN - before if ran == case.op), "")
        allowed = case.allowed(name)
        if error > allowed.error:
            problem = problem or f"more than is explained by: {allowed.because}"
        if name not in done:
            yield Result(case.op, name, shape, error, allowed.error, seconds, problem)
        done.add(name)


def _ways(op: str, arguments: tuple, machine: Machine, done: set[str]) -> Iterator[AbstractContextManager[object]]:
    """What can be arranged for another kernel to be chosen than those already done."""
    from kimi_k3_npu import envs
    from kimi_k3_npu.ops.device import assume
    from kimi_k3_npu.ops.v_up import Bmm, v_up

    device = machine.device
    yield nullcontext()
    if any(name.startswith("sgl_") for name in done):
        yield assume(replace(device, packages=frozenset()))
    if machine.place == "cpu" and op == "moe_experts_mxfp4":
        yield assume(replace(device, soc="a5"))
    if op == "v_up":
        x, w = arguments
        M, B, K = x.shape
        case = Bmm(M, B, K, w.shape[2], x.dtype, True, device)
        for candidate in v_up.kernels:
            if candidate.name not in done and candidate.refuse(case) is None:
                v_up.forget()
                yield patch.dict(os.environ, {envs.V_UP: candidate.name})
        v_up.forget()


def _seconds(kernel: Callable[..., object], arguments: tuple) -> float:
    """Of one call on the NPU, with a warm cache."""
    npu = importlib.import_module("torch_npu").npu
    times = []
    for _ in range(TIMED_RUNS):
        npu.synchronize()
        start = time.perf_counter()
        kernel(*arguments)
        npu.synchronize()
        times.append(time.perf_counter() - start)
    return median(times)


def _give_up(reason: str) -> NoReturn:
    typer.echo(f"nothing was run: {reason}", err=True)
    raise typer.Exit(CANNOT_RUN)


def _no_torch_npu() -> str | None:
    if find_spec("torch_npu"):
        return None
    return (
        "torch_npu is not installed. On an Ascend machine install it beside CANN; elsewhere take the source checkout, "
        "where `make env-npu` makes .venv-npu, and run .venv-npu/bin/kimi-k3-npu selftest"
    )


def npu_is_here() -> bool:
    """Whether there is CANN and a device; torch_npu must be installed.

    Raises:
        LaunchError: torch_npu does not fit this CANN.
    """
    try:
        ctypes.CDLL("libascendcl.so")
    except OSError:
        return False
    try:
        return importlib.import_module("torch_npu").npu.is_available()
    except (ImportError, OSError) as error:
        raise LaunchError(f"CANN is here, but torch_npu cannot be imported: {error}") from error


def _no_emulation() -> str | None:
    """What is missing to emulate one. The emulation is part of the tests, which an installed package does not have."""
    if not resource_path("tests", "npu", "emulation").is_dir():
        return "the emulated operators are in the source checkout (tests/npu/emulation), not in the installed package"
    if find_spec("pytest") is None:
        return "the emulated operators need pytest"
    missing = [tool for tool in ("gcc", "readelf") if shutil.which(tool) is None]
    return f"building a stand-in for CANN needs {' and '.join(missing)}" if missing else None


@contextmanager
def emulation() -> Iterator[Machine]:
    """An A3 with every optional package, as the tests of a source checkout emulate it on CPU tensors."""
    from kimi_k3_npu.ops.device import OPTIONAL_PACKAGES, Device, parse_cann, parse_soc

    sys.path.insert(0, str(resource_path()))
    conftest = importlib.import_module("tests.npu.conftest")
    if not conftest.cann_is_installed():
        conftest.load_stand_in()
        conftest.open_meta_gates()
    importlib.import_module("torch_npu")
    emulated = importlib.import_module("tests.npu.emulation")
    emulated.install()
    on_cpu = importlib.import_module("tests.npu.on_cpu").on_cpu
    in_nz = patch("kimi_k3_npu.ops.experts.is_nz", lambda weight: emulated.weights.nz_tiles(weight) is not None)
    with emulated.with_sgl_kernel_npu(), in_nz:
        device = Device(parse_soc(EMULATED_SOC), parse_cann(EMULATED_CANN), frozenset(OPTIONAL_PACKAGES))
        yield Machine(device, "cpu", on_cpu)
