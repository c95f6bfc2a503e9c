"""`pip install` beside an engine: in an environment that holds what an Ascend image of it holds, nothing is replaced.

The environments hold metadata only, and pip is offered a newer version of everything in them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REQUIRED = [Requirement(line) for line in PROJECT["dependencies"]]
EXTRAS = {
    extra: [Requirement(line) for line in PROJECT["optional-dependencies"][extra]]
    for extra in ("npu", "sglang", "vllm")
}
NEWER = "99.0"


def floor(requirement: Requirement) -> str:
    """The version that is the only thing it asks for. A ceiling or an exact version would break an image one day."""
    (wanted,) = requirement.specifier
    assert wanted.operator == ">="
    return wanted.version


#: What an image holds of packages that its metadata leaves open: nothing older than this, as images are built with the
#: newest.
OPEN = {requirement.name: floor(requirement) for requirement in REQUIRED}

#: The versions that the engines' project files pin, and the extras that suit the image.
IMAGES = {
    "vLLM-Ascend 0.26": (
        {"torch": "2.10.0", "torch-npu": "2.10.0.post4", "transformers": "5.14.1", "vllm": "0.26.0+empty"},
        "vllm,npu",
    ),
    "vLLM-Ascend main": (
        {"torch": "2.10.0", "torch-npu": "2.10.0.post6", "transformers": "5.14.1", "vllm": "0.27.1+empty"},
        "vllm,npu",
    ),
    # Its extra for diffusion pins PyYAML, and asks for moviepy, which takes no pillow 12.
    "SGLang, pyproject_npu.toml": (
        {
            "torch": "2.10.0+cpu",
            "torch-npu": "2.10.0",
            "transformers": "5.12.1",
            "sglang": "0.5.23",
            "pyyaml": "6.0.1",
            "pillow": "11.3.0",
        },
        "sglang,npu",
    ),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it is released."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of a newer version of everything that the package can ask for."""
    folder = tmp_path_factory.mktemp("newer")
    for requirement in [*REQUIRED, *(each for extra in EXTRAS.values() for each in extra)]:
        name = requirement.name.replace("-", "_")
        info = f"{name}-{NEWER}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{NEWER}-py3-none-any.whl", "w") as file:
            file.writestr(f"{info}/METADATA", metadata(requirement.name, NEWER))
            file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            file.writestr(f"{info}/RECORD", "")
    return folder


def metadata(name: str, version: str) -> str:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


def environment(folder: Path, held: Mapping[str, str]) -> Path:
    """A virtual environment with nothing but the metadata of these packages; its site-packages."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, version in held.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(metadata(name, version), encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
        files = "".join(f"{info.name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD"))
        (info / "RECORD").write_text(files, encoding="utf-8")
    return site


def installed(site: Path) -> dict[str, str]:
    return {canonicalize_name(found.name): found.version for found in distributions(path=[str(site)])}


def pip_install(folder: Path, wanted: str, newer: Path) -> None:
    """In the environment `folder`, from nowhere but `newer`."""
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", folder / "bin/python"]
    env = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    subprocess.run([*pip, "install", "-q", "--no-index", "--find-links", newer, wanted], check=True, env=env)


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_of_an_image_is_replaced(image: str, wheel: Path, newer: Path, tmp_path: Path) -> None:
    pins, extras = IMAGES[image]
    site = environment(tmp_path, {**OPEN, **pins})
    before = installed(site)
    pip_install(tmp_path, f"{wheel}[{extras}]", newer)
    assert installed(site) == {**before, "kimi-k3-npu": PROJECT["version"]}


def test_an_older_torch_would_be_replaced(wheel: Path, newer: Path, tmp_path: Path) -> None:
    """So the test above can fail."""
    site = environment(tmp_path, {**OPEN, "torch": "2.9.1"})
    pip_install(tmp_path, str(wheel), newer)
    assert installed(site)["torch"] == NEWER


def test_the_floors_are_what_test_oldest_runs_on() -> None:
    lines = (ROOT / "requirements/oldest.txt").read_text(encoding="utf-8").splitlines()
    locked = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    locked = {canonicalize_name(name): version for name, version in locked.items()}
    found = {requirement.name: Version(locked[requirement.name]) for requirement in REQUIRED}
    assert found == {requirement.name: Version(floor(requirement)) for requirement in REQUIRED}
