"""The packages that this one stands on: what is installed here, and which versions its tests run on."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

#: The versions of requirements/*.txt.
TESTED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.10.0", "2.13.0"),
    "transformers": ("5.12.0", "5.19.0"),
    "torch_npu": ("2.13.0",),
}


@dataclass(frozen=True)
class Finding:
    """`problem` keeps the package from working as it should, `note` may."""

    kind: Literal["ok", "note", "problem"]
    text: str


def installed(name: str) -> str | None:
    """The version of package `name` in this environment."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine(uses: Mapping[str, str]) -> Iterator[Finding]:
    """The version of each package of `uses`, which says of a package what it is for if it can be done without."""
    versions = {name: found for name in uses if (found := installed(name))}
    for name, use in uses.items():
        if name in versions:
            yield _found(name, versions[name])
        else:
            yield Finding("note", f"{name} is not installed; {use}")
    torch, npu = versions.get("torch"), versions.get("torch_npu")
    if torch and npu and torch.split(".")[:2] != npu.split(".")[:2]:
        yield Finding("problem", f"torch_npu {npu} is for torch {'.'.join(npu.split('.')[:2])}, found torch {torch}")
    elif npu:
        yield from _lacking(npu)


def _lacking(npu: str) -> Iterator[Finding]:
    """What kernels need of torch_npu and this version has not."""
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:
        yield Finding("note", f"torch_npu {npu} cannot be imported ({error}), so its operators are not looked at")
        return
    from kimi_k3_npu.ops import schemas

    for need in schemas.missing():
        yield Finding("note", f"torch_npu {npu} has no {need}; other kernels take the place of those that need it")


def _found(name: str, found: str) -> Finding:
    tested = TESTED.get(name)
    if tested is None:
        return Finding("ok", f"{name} {found}")
    if found.partition("+")[0] in tested:  # a build of it, such as 2.10.0+cpu
        return Finding("ok", f"{name} {found}, a tested version")
    return Finding("note", f"{name} {found}; tested with {' and '.join(tested)}")
