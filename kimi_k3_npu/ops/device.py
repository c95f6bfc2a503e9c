"""Which NPU this is: its generation, its CANN version and the optional kernel packages. The only place that finds out.

Whatever chooses a kernel takes these as arguments, so that a plan for an A3 can be made on a laptop and equals what
the A3 does. `current()` is for kernels that run: it detects once per process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kimi_k3_npu import envs
from kimi_k3_npu.errors import LaunchError

#: Atlas A2 (Ascend 910B), Atlas A3 (Ascend 910_93), Atlas A5 (Ascend 950), or no NPU.
Soc = Literal["a2", "a3", "a5", "cpu"]

#: Packages with Ascend kernels that are used when they can be imported and never required.
OPTIONAL_PACKAGES = ("sgl_kernel_npu",)

# What `torch_npu.npu.get_soc_version()` counts: the enumeration SocVersion of torch_npu's csrc/core/npu/NpuVariables.h.
_SOC_CODES: dict[range, Soc] = {range(220, 240): "a2", range(250, 260): "a3", range(260, 270): "a5"}

# Chip names as CANN reports them. Ascend910B without a digit is the first generation, which has no bf16; 910_95 is
# what the 950 was called before its release.
_SOC_NAMES: tuple[tuple[str, Soc], ...] = (
    (r"ascend910b[1-9].*", "a2"),
    (r"ascend910_93.*", "a3"),
    (r"ascend910_95.*|ascend950.*", "a5"),
)


# The forms in torch_npu's csrc/npu/GetCANNInfo.h: a.b.c, a.b.RCd, a.b.Tg, a.b.RCd.alphaf.
_CANN = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:[.-]?((?:rc|t|alpha|beta).*))?", re.IGNORECASE)


class Cann(NamedTuple):
    """A CANN version that compares: 9.2.RC1 comes before 9.2.0. Build it with `parse_cann`."""

    major: int
    minor: int
    patch: int = 0
    released: bool = True

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}" + ("" if self.released else " pre-release")


@dataclass(frozen=True)
class Device:
    """What the kernels of a process run on. `cann` is None exactly when there is no NPU.

    `missing` is what other versions have and the installed ones do not: kernels of the packages, and operators of
    torch_npu and their arguments.
    """

    soc: Soc
    cann: Cann | None = None
    packages: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if (self.soc == "cpu") != (self.cann is None):
            raise LaunchError(f"soc={self.soc} with CANN {self.cann}: an NPU has a CANN version, a CPU has none")

    def before(self, version: Cann) -> bool:
        """Whether this is an NPU with a CANN older than `version`."""
        return self.cann is not None and self.cann < version


def parse_soc(text: str) -> Soc:
    """The generation for "a2", "a3", "a5", "cpu" or a chip name ("Ascend910B3", "Ascend910_9391", "Ascend950PR_9589").

    Raises:
        LaunchError: The text is neither, or names a chip that cannot run Kimi-K3.
    """
    lowered = text.strip().lower()
    for soc in get_args(Soc):
        if lowered == soc:
            return soc
    for pattern, soc in _SOC_NAMES:
        if re.fullmatch(pattern, lowered):
            return soc
    raise LaunchError(
        f"{text!r} is not a supported NPU: a2 (Ascend910B1..4), a3 (Ascend910_93xx), a5 (Ascend950) or cpu"
    )


def parse_cann(version: str | tuple[int, ...]) -> Cann:
    """The version for "9.1", "8.5.0", "8.3.RC1", "9.2.0-beta.1", (9, 1), (8, 5, 0) or a `Cann`.

    Raises:
        LaunchError: It is none of these.
    """
    if isinstance(version, Cann):
        return version
    text = ".".join(map(str, version)) if isinstance(version, tuple) else version
    # A number is refused: 9.10 would read as 9.1.
    if isinstance(text, str) and (match := _CANN.fullmatch(text.strip())):
        major, minor, patch, stage = match.groups()
        return Cann(int(major), int(minor), int(patch or 0), released=stage is None)
    raise LaunchError(f"{version!r} is not a CANN version; write it as 9.1, 8.5.0 or 8.3.RC1")


def detect(
    *, soc: str | None = None, cann: str | tuple[int, ...] | None = None, packages: Iterable[str] | None = None
) -> Device:
    """The device of this machine; each argument replaces what would be found, and so does its environment variable.

    torch_npu is asked only for what is not given, and for what it lacks. Without torch_npu, or without an NPU, the
    device is the CPU.

    Args:
        soc: As for `parse_soc`.
        cann: As for `parse_cann`.
        packages: The optional kernel packages to assume, with all of their kernels, instead of those that can be
            imported, which are asked for each; torch_npu is then not asked what it lacks either.

    Raises:
        LaunchError: torch_npu cannot be imported or reports something unknown, or an NPU's CANN version is not known.
    """
    envs.check()
    soc, cann = soc or envs.text(envs.SOC), cann or envs.text(envs.CANN)
    found = parse_soc(soc) if soc else _ask_soc()
    version = parse_cann(cann) if cann else _ask_cann(found)
    if packages is not None:
        return Device(found, version, frozenset(packages))
    installed = frozenset(name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name))
    return Device(found, version, installed, frozenset() if found == "cpu" else _missing(installed))


def current() -> Device:
    """The device that kernels of this process run on: the assumed one, else what `detect()` found the first time."""
    return _ASSUMED.get() or _detected()


@contextmanager
def assume(device: Device) -> Iterator[None]:
    """Let `current()` answer `device` inside the block: for dry runs and tests on machines without an NPU."""
    token = _ASSUMED.set(device)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


_ASSUMED: ContextVar[Device | None] = ContextVar("assumed_device", default=None)
_detected = functools.cache(detect)


def _missing(packages: frozenset[str]) -> frozenset[str]:
    """What the installed packages lack, and the torch_npu of an NPU that is here; for a plan it lacks nothing."""
    from kimi_k3_npu.ops import schemas, sgl  # which import torch

    lacking = frozenset(sgl.missing() if packages else ())
    return lacking.union(schemas.missing()) if _npu_is_here() else lacking


def _npu_is_here() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    try:
        return importlib.import_module("torch_npu").npu.is_available()
    except (ImportError, OSError):
        return False  # which `_ask_soc` refuses unless the device is named, and nothing can run on it


def _ask_soc() -> Soc:
    if importlib.util.find_spec("torch_npu") is None:
        return "cpu"
    try:
        npu = importlib.import_module("torch_npu").npu
    except (ImportError, OSError) as error:
        raise LaunchError(
            f"torch_npu is installed but cannot be imported ({error}); source CANN's set_env.sh, or name the device: "
            f"{envs.SOC} and {envs.CANN}"
        ) from error
    if not npu.is_available():
        return "cpu"
    code = npu.get_soc_version()
    for codes, soc in _SOC_CODES.items():
        if code in codes:
            return soc
    return parse_soc(npu.get_device_name())


def _ask_cann(soc: Soc) -> Cann | None:
    if soc == "cpu":
        return None
    if importlib.util.find_spec("torch_npu") is not None:
        npu = importlib.import_module("torch_npu").npu
        if npu.is_available() and (version := npu.utils.get_cann_version()):
            return parse_cann(version)
    raise LaunchError(
        f"the CANN version for {soc} is unknown here: give it as an argument, or set {envs.CANN}, say to 9.1"
    )
