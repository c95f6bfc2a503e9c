"""The flags of the SGLang recipes, before the real argument parser of the installed SGLang."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kimi_k3_npu import load_model
from kimi_k3_npu.cli.app import app
from kimi_k3_npu.recipes.engine_flags import load_flags
from kimi_k3_npu.recipes.launch import all_launches, example_inputs
from kimi_k3_npu.recipes.reader import load_recipe, recipe_names
from kimi_k3_npu.recipes.render import arguments
from kimi_k3_npu.tiny import write_tiny
from tests.engines.sglang.harness import Server, free_port, greedy

SGLANG_RECIPES = [name for name in recipe_names() if load_recipe(name).engine.name == "sglang"]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize("name", SGLANG_RECIPES)
def test_flags_are_accepted(parser: argparse.ArgumentParser, name: str) -> None:
    recipe = load_recipe(name)
    for launch in all_launches(recipe, example_inputs(recipe)):
        if not launch.role.nodes:
            continue  # the router is another program
        words = arguments(launch)[len(launch.command) :]
        parsed = vars(parser.parse_args(words))  # exits for a flag or a value that it does not know
        assert parsed["model_path"] == launch.flag("--model-path")
        assert parsed["model_impl"] == launch.flag("--model-impl")
        if "--tp-size" in launch.flags:
            assert parsed["tp_size"] == launch.flag("--tp-size")


def test_four_nodes(parser: argparse.ArgumentParser) -> None:
    """What the attention-TP options come to in SGLang itself."""
    recipe = load_recipe("sglang-a3-4node")
    launch = all_launches(recipe, example_inputs(recipe))[3]
    parsed = parser.parse_args(arguments(launch)[len(launch.command) :])
    assert parsed.enable_shared_experts_attn_tp
    assert parsed.enable_dense_mlp_attn_tp
    assert (parsed.tp_size, parsed.dp_size, parsed.moe_a2a_backend, parsed.node_rank) == (64, 4, "deepep", 3)
    assert parsed.cuda_graph_bs_decode == [2, 4, 8, 16]


def test_the_list_is_of_this_parser(parser: argparse.ArgumentParser) -> None:
    """recipes/flags/sglang-0.5.23.txt, by which the checks go where SGLang is not installed."""
    kept = load_flags("sglang-0.5.23")
    real = {flag: action for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    assert set(kept.names) == set(real)
    for flag, action in real.items():
        assert (kept.takes(flag) == "switch") == (action.nargs == 0), flag
        assert set(kept.choices(flag)) == {str(choice) for choice in action.choices or ()}, flag
        assert kept.canonical(flag) in action.option_strings, flag


@pytest.mark.parametrize(
    ("flag", "texts"),
    [
        ("--tp-size", ["8", " 8 ", "1_0", "abc", "8.0", "0x8", "1e3"]),
        ("--mem-fraction-static", ["0.85", ".5", "5e-1", "abc", "0,5"]),
        ("--context-length", ["131072", "128k", "128Ki", "1.5k", "1.5Ki", "128K", "1e5"]),
        ("--cuda-graph-bs-decode", ["4", "x"]),
        ("--default-chat-template-kwargs", ['{"a": 1}', "{a: 1}", "x"]),
        ("--moe-a2a-backend", ["deepep", "deep"]),
    ],
)
def test_values_are_read_as_the_parser_does(parser: argparse.ArgumentParser, flag: str, texts: list[str]) -> None:
    """Each of the types: the same values refused, and the others converted to the same."""
    kept = load_flags("sglang-0.5.23")
    for text in texts:
        try:
            parsed = parser.parse_args(["--model-path", "m", flag, text])
        except SystemExit:
            assert list(kept.faults(flag, text)), (flag, text)
            continue
        found = vars(parsed)[flag.strip("-").replace("-", "_")]
        assert not list(kept.faults(flag, text)), (flag, text)
        assert (found[0] if isinstance(found, list) else found) == kept.read(flag, text)


def test_the_types_are_of_this_parser(parser: argparse.ArgumentParser) -> None:
    """Every option that converts its value is listed with its type."""
    kept = load_flags("sglang-0.5.23")
    types = {"int": "int", "float": "float", "human_readable_int": "size", "loads": "json", "json_list_type": "json"}
    wanted = {
        action.option_strings[0]: types[action.type.__name__]
        for action in parser._actions
        if getattr(action.type, "__name__", None) in types
    }
    assert len(wanted) > 150
    assert {flag: kept.option(flag).rule.kind for flag in wanted} == wanted


@pytest.mark.parametrize("flag", ["--fuseep-mode 3", "--cuda-graph-bs 1", "--k3-shared-experts-attn-tp"])
def test_former_flags_are_refused(parser: argparse.ArgumentParser, flag: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", *flag.split()])


def test_the_recipe_for_a_cpu_serves(tmp_path: Path) -> None:
    """As its user does it: the tiny checkpoint is made, the script is rendered, and run."""
    model, script, port = tmp_path / "tiny", tmp_path / "launch.sh", free_port()
    write_tiny(model)
    place = ["--node-rank", "0", "--master-addr", "127.0.0.1", "--model-path", str(model)]
    settings = ["--set", f"port={port}", "--set", f"python={sys.executable}"]
    rendered = CliRunner().invoke(app, ["recipe", "render", "cpu-tiny", *place, *settings])
    assert rendered.exit_code == 0, rendered.output
    script.write_text(rendered.stdout)
    server = Server(tmp_path, script=script, port=port)
    try:
        server.wait()
        prompt = list(b"What is a neural processing unit?")
        assert server.greedy(prompt)["output_ids"] == greedy(load_model(model, dtype=torch.float32), prompt)
    finally:
        server.close()
