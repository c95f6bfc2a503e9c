"""`recipe`: list, show, render."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.recipes.reader import load_recipe, recipe_names

RENDER = ("recipe", "render", "sglang-a3-4node-dspark", "--node-rank", "0", "--master-addr", "10.0.0.1")
INPUTS = ("--set", "interface=eth0", "--set", "draft_model_path=/d")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(end.value.code or 0), out, err

    return run


def test_list(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = run("recipe", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == recipe_names()
    found = json.loads(run("recipe", "list", "--json")[1])
    assert {one["name"]: one["status"] for one in found}["sglang-a3-3node"] == "unverified"


@pytest.mark.parametrize("name", recipe_names())
def test_show(run: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, out, _ = run("recipe", "show", name)
    assert code == 0
    recipe = load_recipe(name)
    for role in recipe.roles.values():
        assert all(flag in out for flag in role.flags)
        assert all(f"{variable}=" in out for variable in role.environment)
    assert json.loads(run("recipe", "show", name, "--json")[1])["name"] == name


def test_render(run: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = run(*RENDER, *INPUTS, "--model-path", "/m")
    assert (code, err) == (0, "")
    assert subprocess.run(["bash", "-n"], input=out, text=True).returncode == 0
    assert "--enable-shared-experts-attn-tp" in out
    assert "# note [draft]: the draft's weights and cache are not counted" in out
    assert "exec docker run" in run(*RENDER, *INPUTS, "--model-path", "/m", "--format", "docker")[1]
    router = run(
        "recipe", "render", "sglang-a3-2p4d", "--role", "router", "--master-addr", "a", "--set", "decode_addr=b"
    )
    assert "--prefill http://a:8000 8995 --decode http://b:8000" in router[1]


def test_checks_come_first(run: Callable[..., tuple[int, str, str]]) -> None:
    """A launch that cannot work is not printed, unless it is forced."""
    broken = (*RENDER, *INPUTS, "--model-path", "/m", "--set", "max-running-requests=128")
    code, out, err = run(*broken)
    assert (code, out) == (1, "")
    assert "32 requests x 8 rows = 256 in a decode step, SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK has room" in err
    code, out, _ = run(*broken, "--force")
    assert code == 0
    assert "# error [deepep-capacity]:" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*RENDER, *INPUTS), "asks for model_path: folder of the checkpoint; give it with --model-path"),
        (("recipe", "render", "sglang-a3-4node", "--node-rank", "9"), "has nodes 0..3, not 9"),
        (("recipe", "render", "sglang-a3-4node", "--role", "serve"), "has no role without nodes, not 'serve'"),
        (("recipe", "show", "sglang"), "no recipe sglang; "),
    ],
)
def test_mistakes(run: Callable[..., tuple[int, str, str]], args: tuple[str, ...], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    assert message in err


def test_wrong_usage(run: Callable[..., tuple[int, str, str]]) -> None:
    assert run("recipe", "render", "cpu-tiny")[0] == 2
    assert run("recipe", "render", "cpu-tiny", "--node-rank", "0", "--set", "x")[0] == 2
