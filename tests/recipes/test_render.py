"""Every recipe makes a script for every node that bash can read, and what bash passes on is what the recipe says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kimi_k3_npu.recipes.launch import Launch, all_launches, example_inputs, resolve
from kimi_k3_npu.recipes.reader import load_recipe, recipe_names
from kimi_k3_npu.recipes.render import arguments, bash, docker
from kimi_k3_npu.recipes.schema import RecipeError
from tests.patience import PATIENCE

SHELLCHECK = shutil.which("shellcheck")

#: Prints what it was started with.
ECHO = f"""#!{sys.executable}
import json, os, sys
if "-c" in sys.argv:
    sys.exit(0)
print(json.dumps({{"args": sys.argv[1:], "env": dict(os.environ)}}))
"""


def launches(name: str) -> list[Launch]:
    recipe = load_recipe(name)
    return all_launches(recipe, example_inputs(recipe))


def parses(script: str) -> None:
    found = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert (found.returncode, found.stderr) == (0, "")
    if SHELLCHECK:
        found = subprocess.run([SHELLCHECK, "-S", "warning", "-"], input=script, text=True, capture_output=True)
        assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("name", recipe_names())
def test_bash_reads_it(name: str) -> None:
    for launch in launches(name):
        parses(bash(launch, ["note [x]: of\ntwo lines"]))


@pytest.mark.parametrize("name", [name for name in recipe_names() if name != "cpu-tiny"])
def test_bash_reads_the_container(name: str) -> None:
    for launch in launches(name):
        if load_recipe(name).container:
            parses(docker(launch, image="an/image:tag"))


def test_an_image_is_asked_for() -> None:
    with pytest.raises(RecipeError, match="sglang-a3-3node names no image, as its source does not; give it"):
        docker(launches("sglang-a3-3node")[0])
    with pytest.raises(RecipeError, match="cpu-tiny says nothing about a container"):
        docker(launches("cpu-tiny")[0])


def test_the_container_sees_the_checkpoint() -> None:
    script = docker(launches("sglang-a3-4node-dspark")[0])
    assert "--volume=/models/Kimi-K3:/models/Kimi-K3:ro" in script
    assert "--volume=/models/Kimi-K3-DSpark:/models/Kimi-K3-DSpark:ro" in script
    assert "quay.io/ascend/sglang:main-cann9.0.0-a3 bash -c '" in script


def run(script: str, folder: Path) -> dict:
    """Run a script in which python3 is ECHO."""
    echo = folder / "python3"
    echo.write_text(ECHO)
    echo.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, env=env, timeout=PATIENCE)
    return json.loads(done.stdout)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet=st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1))
def test_nothing_is_taken_apart(tmp_path: Path, text: str) -> None:
    """Quotes, spaces, dollars, line ends: the program gets what was given. Blanks alone are refused as not given."""
    assume(text.strip())
    recipe = load_recipe("cpu-tiny")
    given = {"model_path": "models/" + text, "port": "1", "OMP_NUM_THREADS": text}
    launch = resolve(recipe, "serve", 0, given)
    got = run(bash(launch, [text]), tmp_path)
    assert [*launch.command[:1], *got["args"]] == arguments(launch)
    assert got["args"][got["args"].index("--model-path") + 1] == "models/" + text
    assert got["env"]["OMP_NUM_THREADS"] == text


def test_json_and_lists(tmp_path: Path) -> None:
    recipe = load_recipe("cpu-tiny")
    changes = {"json-model-override-args": '{"a": "it\'s"}', "cuda-graph-bs-decode": "1 2"}
    launch = resolve(recipe, "serve", 0, {"model_path": "m"} | changes)
    args = run(bash(launch), tmp_path)["args"]
    assert json.loads(args[args.index("--json-model-override-args") + 1]) == {"a": "it's"}
    assert args[args.index("--cuda-graph-bs-decode") + 1 :][:2] == ["1", "2"]


def test_looks_before_it_starts(tmp_path: Path) -> None:
    recipe = load_recipe("cpu-tiny")
    script = bash(resolve(recipe, "serve", 0, {"model_path": str(tmp_path / "no")}))
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (1, f"error: no folder {tmp_path}/no\n")
