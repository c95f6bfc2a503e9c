"""A launch as a script: everything that bash sees is quoted, and what can be looked at before the start is."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from kimi_k3_npu import __version__
from kimi_k3_npu.recipes.launch import Launch
from kimi_k3_npu.recipes.schema import DERIVED, RecipeError, Setting
from kimi_k3_npu.recipes.serving import runs_own_model

_INDENT = "    "
#: Inputs that are folders of checkpoints.
_FOLDERS = ("model_path", "draft_model_path")


def bash(launch: Launch, remarks: Sequence[str] = ()) -> str:
    """The script for one process. `remarks` are written at the top."""
    lines = [
        "#!/usr/bin/env bash",
        *_comment(launch, remarks),
        "set -euo pipefail",
        "",
        'fail() { echo "error: $*" >&2; exit 1; }',
        "",
        *_set_up(launch),
        *_environment(launch),
        *_look(launch),
        *_command(launch),
    ]
    return "\n".join(lines) + "\n"


def docker(launch: Launch, remarks: Sequence[str] = (), image: str | None = None) -> str:
    """A script that runs the same in the engine's container. Raises RecipeError if there is no image."""
    container = launch.recipe.container
    if container is None:
        raise RecipeError(f"{launch.recipe.name} says nothing about a container; use --format bash")
    image = image or container.image
    if image is None:
        raise RecipeError(f"{launch.recipe.name} names no image, as its source does not; give it with --set image=...")
    if image[:1] == "-" or image != "".join(image.split()):
        raise RecipeError(
            f"image is {image!r}, which is no name of an image; give one such as quay.io/ascend/cann:9.0.0"
        )
    folders = [_mounted(name, launch.inputs[name]) for name in _FOLDERS if name in launch.inputs]
    mounts = [f"{path}:{path}" for path in container.mounts]
    mounts += [f"{path}:{path}:ro" for path in folders]
    words = ["docker", "run", "--rm", f"--name=kimi-k3-{launch.role.name}", *container.options]
    words += [f"--device={device}" for device in container.devices]
    words += [f"--volume={mount}" for mount in mounts]
    inside = f"{shlex.quote(image)} bash -c {shlex.quote(bash(launch, remarks))}"
    head = ["#!/usr/bin/env bash", *_comment(launch, remarks), "set -euo pipefail", ""]
    return "\n".join([*head, f"exec {_broken(words)} \\\n{_INDENT}{inside}"]) + "\n"


def _mounted(name: str, path: str) -> str:
    """The folder, which the container sees under the same path. Raises RecipeError where docker cannot mount it."""
    if not PurePosixPath(path).is_absolute():
        raise RecipeError(f"{name} is {path!r}: with --format docker it must be an absolute path, to be mounted")
    if ":" in path:
        raise RecipeError(f"{name} is {path!r}: docker takes a colon for the end of the path; use a path without one")
    return path


def arguments(launch: Launch) -> list[str]:
    """The command with its flags, word by word."""
    return [*launch.command, *(word for name, setting in launch.flags.items() for word in _flag(name, setting))]


def _comment(launch: Launch, remarks: Sequence[str]) -> Iterator[str]:
    recipe, role = launch.recipe, launch.role
    node = recipe.first_node(role.name) + launch.rank
    place = f"node {node} of 0..{recipe.hardware.nodes - 1}" if role.nodes else "any node"
    yield f"# {_one_line(recipe.title)}"
    yield f"# Recipe {recipe.name} ({recipe.status}): {role.name}, {place}. Made by kimi-k3-npu {__version__};"
    yield "# render it again instead of editing it."
    yield f"# Source: {_one_line(recipe.sources[recipe.source])}"
    for remark in remarks:
        yield from (f"# {line}" for line in remark.splitlines())


def _set_up(launch: Launch) -> Iterator[str]:
    if launch.role.unset:
        yield "unset " + " ".join(map(shlex.quote, launch.role.unset))
    for script in launch.role.set_up:
        path = shlex.quote(script)
        yield f"[[ -r {path} ]] || fail {shlex.quote(f'{script} is missing: is CANN installed?')}"
        yield f"set +u; source {path}; set -u"
    if launch.role.unset or launch.role.set_up:
        yield ""


def _environment(launch: Launch) -> Iterator[str]:
    for name, setting in launch.environment.items():
        note = f"  # {_one_line(setting.why)}" + (f" ({DERIVED})" if setting.source == DERIVED else "")
        yield f"export {name}={shlex.quote(str(setting.value))}{note if setting.why else ''}"
    if launch.environment:
        yield ""


def _look(launch: Launch) -> Iterator[str]:
    """What bash can tell is missing."""
    if not launch.role.nodes:
        return
    for name in _FOLDERS:
        path = launch.inputs.get(name, "")
        if PurePosixPath(path).is_absolute():
            yield f"[[ -d {shlex.quote(path)} ]] || fail {shlex.quote(f'no folder {path}')}"
    if interface := launch.inputs.get("interface"):
        path = shlex.quote(f"/sys/class/net/{interface}")
        yield f"[[ -e {path} ]] || fail {shlex.quote(f'no network interface {interface}')}"
    hardware = launch.recipe.hardware
    if hardware.soc != "cpu":
        yield "dies=$(find /dev -maxdepth 1 -name 'davinci[0-9]*' | wc -l)"
        needed = hardware.dies_per_node
        yield f'(( dies >= {needed} )) || fail "$dies NPU dies here, {needed} are needed"'
    python = launch.command[0] if "python" in launch.command[0] else "python3"
    if runs_own_model(launch):
        yield (
            f"{shlex.quote(python)} -c 'import kimi_k3_npu' || "
            f"fail {shlex.quote('kimi_k3_npu is not installed here: pip install kimi-k3-npu')}"
        )
    yield ""


def _command(launch: Launch) -> Iterator[str]:
    groups = [list(launch.command), *(_flag(name, setting) for name, setting in launch.flags.items())]
    lines = [" ".join(map(shlex.quote, group)) for group in groups]
    yield "exec " + f" \\\n{_INDENT}".join(lines)


def _flag(name: str, setting: Setting) -> list[str]:
    value: Any = setting.value
    if value is True:
        return [name]
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


def _broken(words: Sequence[str]) -> str:
    """Words of a command, options on lines of their own."""
    quoted = (f"\\\n{_INDENT}{shlex.quote(word)}" if word[:2] == "--" else shlex.quote(word) for word in words)
    return " ".join(quoted)


def _one_line(text: str) -> str:
    """What a comment may hold."""
    return " ".join(text.split())
