"""What a launch is given: addresses, paths, and values of flags and variables as the engines' parsers take them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.plan.checks import check_launch
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.addresses import read_address, read_endpoint
from kimi_k3_npu.recipes.engine_flags import load_flags
from kimi_k3_npu.recipes.launch import Launch, example_inputs, resolve
from kimi_k3_npu.recipes.reader import load_recipe, read_recipe
from kimi_k3_npu.recipes.render import bash, docker
from kimi_k3_npu.recipes.schema import RecipeError
from kimi_k3_npu.recipes.serving import serving
from kimi_k3_npu.recipes.values import stated_rules
from kimi_k3_npu.tiny import tiny_config

SGLANG, VLLM = "sglang-a3-4node", "vllm-a3-4node"
RENDER = ("recipe", "render", SGLANG, "--node-rank", "0")
PLACE = ("--master-addr=10.0.0.1", "--model-path=/m", "--set=interface=eth0")


def launch(name: str, **given: str) -> Launch:
    recipe = load_recipe(name)
    return resolve(recipe, recipe.serving_roles[0].name, 0, example_inputs(recipe) | given)


def errors(name: str, **given: str) -> list[str]:
    """What the checks find without working anything out for the model."""
    subject = Subject(launch(name, **given), KimiK3Config.from_hf(tiny_config()), deep=False)
    return [str(one) for one in check_launch(subject) if one.check in ("flag-value", "variable-value")]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(args)
        return int(end.value.code or 0), *capfd.readouterr()

    return run


class TestAddresses:
    @pytest.mark.parametrize(
        ("text", "bare"),
        [
            ("10.0.0.1", "10.0.0.1"),
            ("node-3.rack_1.example", "node-3.rack_1.example"),
            ("fd00::1", "fd00::1"),
            ("[fd00::1]", "fd00::1"),
            ("fe80::1%eth0", "fe80::1%eth0"),
        ],
    )
    def test_right(self, text: str, bare: str) -> None:
        assert read_address(text) == bare

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("http://10.0.0.1", "is a URL; give the address alone"),
            ("10.0.0.1/24", "is a URL"),
            ("10.0.0.1:29600", "has a port"),
            ("node:1", "has a port"),
            ("fd00::zz", "is no IPv6 address"),
            ("999.1.1.1", "neither an IP address nor a host name"),
            ("two words", "neither an IP address nor a host name"),
            ("-node", "neither an IP address nor a host name"),
        ],
    )
    def test_wrong(self, run: Callable[..., tuple[int, str, str]], text: str, words: str) -> None:
        code, out, err = run(*RENDER, f"--master-addr={text}", "--model-path", "/m", "--set", "interface=eth0")
        assert (code, out) == (1, "")
        assert "master_addr is" in err
        assert words in err
        assert "--master-addr" in err

    @pytest.mark.parametrize("text", ["fd00::1:29600", "a", "a:", "a:0", "a:65536", "a:x", "http://a:1"])
    def test_wrong_endpoints(self, text: str) -> None:
        with pytest.raises(ValueError, match=r"\S"):
            read_endpoint(text)
        assert read_endpoint("[fd00::1]:29600") == "[fd00::1]:29600"

    def test_ipv6_stands_in_brackets_before_a_port(self, run: Callable[..., tuple[int, str, str]]) -> None:
        place = ("--master-addr", "fd00::1", "--model-path", "/m", "--set", "interface=bond0")
        code, out, _ = run(*RENDER, *place)
        assert code == 0
        assert "--dist-init-addr '[fd00::1]:29600'" in out
        assert "SGLANG_HOST_IP=fd00::1" in out
        router = launch("sglang-a3-2p4d", master_addr="fd00::1", prefill_addr="fd00::1")
        assert router.variable("ASCEND_MF_STORE_URL") == "tcp://[fd00::1]:24666"


class TestNothing:
    """What a shell makes of a variable that is not set."""

    @pytest.mark.parametrize(
        ("change", "name"),
        [
            ("--master-addr=", "master_addr"),
            ("--model-path=", "model_path"),
            ("--model-path=  ", "model_path"),
            ("--set=interface=", "interface"),
            ("--set=port=", "port"),
            ("--set=HCCL_BUFFSIZE=", "HCCL_BUFFSIZE"),
            ("--set=tp-size=", "tp-size"),
        ],
    )
    def test_is_refused(self, run: Callable[..., tuple[int, str, str]], change: str, name: str) -> None:
        words = [word for word in PLACE if not word.startswith(change.strip().rstrip("="))]
        code, out, err = run(*RENDER, *words, change)
        assert (code, out) == (1, "")
        assert f"error: {name} is empty, so it is not given" in err

    def test_twice(self, run: Callable[..., tuple[int, str, str]]) -> None:
        code, _, err = run(*RENDER, *PLACE, "--set", "interface=eth1")
        assert code == 2
        assert "interface is given twice" in err

    @pytest.mark.parametrize("value", ["\udce9", "a\0b"])
    def test_what_no_script_holds(self, value: str) -> None:
        with pytest.raises(RecipeError, match=r"model_path is .*, which a script cannot hold: it must be UTF-8"):
            launch(SGLANG, model_path=value)

    @pytest.mark.parametrize("value", ["eth0 eth1", "eth0/1", "a-name-of-16-chars", ".."])
    def test_interfaces(self, value: str) -> None:
        with pytest.raises(RecipeError, match="must be the name of one network interface, such as eth0"):
            launch(SGLANG, interface=value)


class TestValues:
    @pytest.mark.parametrize(
        ("name", "flag", "value", "words"),
        [
            (SGLANG, "mem-fraction-static", "abc", "must be a number above 0 and below 1"),
            (SGLANG, "mem-fraction-static", "2", "must be a number above 0 and below 1"),
            (SGLANG, "mem-fraction-static", "nan", "must be a number above 0 and below 1"),
            (SGLANG, "tp-size", "abc", "must be a whole number at least 1"),
            (SGLANG, "tp-size", "0", "must be a whole number at least 1"),
            (SGLANG, "tp-size", "8.5", "must be a whole number at least 1"),
            (SGLANG, "tp-size", "9" * 400, "must be a whole number at least 1"),
            (SGLANG, "chunked-prefill-size", "abc", "must be a whole number at least -1"),
            (SGLANG, "cuda-graph-bs-decode", "1 x", "must be a whole number at least 1"),
            (SGLANG, "context-length", "1.5Ki", "must be a whole number, or one such as 128k or 128Ki, at least 1"),
            (SGLANG, "json-model-override-args", "{", "must be a JSON object"),
            (SGLANG, "json-model-override-args", "[" * 100_000, "must be a JSON object"),
            (SGLANG, "dist-init-addr", "fd00::1:29600", "is not ADDRESS:PORT (an IPv6 address in brackets)"),
            (SGLANG, "watchdog-timeout", "inf", "must be a number above 0"),
            (SGLANG, "served-model-name", "--host", "must not begin with -: the engine would take it for a flag"),
            (VLLM, "tensor-parallel-size", "abc", "must be a whole number at least 1"),
            (VLLM, "gpu-memory-utilization", "1.1", "must be a number above 0 and at most 1"),
            (VLLM, "max-model-len", "abc", "must be a whole number, or one such as 128k or 128Ki, at least 1"),
            (VLLM, "compilation-config", "[]", "must be a JSON object"),
            (VLLM, "kv-transfer-config", "x", "must be a JSON object"),
        ],
    )
    def test_findings(self, name: str, flag: str, value: str, words: str) -> None:
        found = errors(name, **{flag: value})
        assert len(found) == 1
        assert found[0].startswith(f"error [flag-value]: --{flag} is ")
        assert words in found[0]
        assert len(found[0]) < 300

    @pytest.mark.parametrize(
        ("flag", "value", "key"),
        [
            ("speculative-config", '{"num_speculative_tokens": "x"}', "num_speculative_tokens is 'x': must be a whole"),
            ("compilation-config", '{"cudagraph_capture_sizes": 4}', "cudagraph_capture_sizes is '4': must be a list"),
            ("kv-transfer-config", '{"kv_role": []}', "kv_role is '[]': must be text"),
            (
                "kv-transfer-config",
                '{"kv_connector_extra_config": {"connectors": [1]}}',
                "kv_connector_extra_config.connectors is '[1]': must be a list of JSON objects",
            ),
        ],
    )
    def test_inside_of_json(self, flag: str, value: str, key: str) -> None:
        found = errors(VLLM, **{flag: value})
        assert len(found) == 1
        assert f"--{flag}.{key}" in found[0]

    @pytest.mark.parametrize("value", ["abc", "0", "1.5"])
    def test_variables(self, value: str) -> None:
        found = errors(SGLANG, HCCL_BUFFSIZE=value)
        words = f"error [variable-value]: HCCL_BUFFSIZE is '{value}': must be a whole number at least 1"
        assert found == [words]

    def test_ports_of_inputs(self) -> None:
        for name in ("port", "rendezvous_port"):
            for value in ("abc", "0", "65536", "-1"):
                words = f"{name} is '{value}': must be a whole number at least 1 and at most 65535"
                with pytest.raises(RecipeError, match=words):
                    launch(SGLANG, **{name: value})

    @pytest.mark.parametrize("flag", ["tp-size=abc", "chunked-prefill-size=abc", "mem-fraction-static=2", "tp=0x8"])
    def test_before_anything_is_worked_out(self, run: Callable[..., tuple[int, str, str]], flag: str) -> None:
        for command in ((*RENDER, *PLACE), ("plan", SGLANG)):
            code, out, err = run(*command, "--set", flag)
            assert code == 1
            assert "Traceback" not in err
            if not flag.startswith("tp="):
                assert f"error [flag-value]: --{flag.split('=')[0]} is '{flag.split('=')[1]}': must be a" in out + err

    def test_as_the_parser_converts_them(self) -> None:
        """Sizes with suffixes; decimal numbers whatever their zeros; another name of a flag takes its place."""
        given = {"context-length": "128Ki", "max-running-requests": "064", "tensor-parallel-size": "32"}
        flags = launch(SGLANG, **given).flags_plain
        assert (flags["--context-length"], flags["--max-running-requests"], flags["--tp-size"]) == (131072, 64, 32)
        assert "--tensor-parallel-size" not in flags

    def test_prompts_that_are_not_cut(self) -> None:
        """-1 is SGLang's way to say so: the longest request is then one pass."""
        of = serving(launch(SGLANG, **{"chunked-prefill-size": "-1", "context-length": "4096"}))
        assert of.chunk == 4096

    def test_what_is_stated_exists(self) -> None:
        for engine, release in (("sglang", "sglang-0.5.23"), ("vllm", "vllm-0.32.0")):
            flags = load_flags(release)
            assert {name.partition(".")[0] for name in stated_rules(engine)} <= set(flags.names)


def recipe_with(flags: dict[str, Any]) -> dict[str, Any]:
    role = {"nodes": 1, "command": ["x"], "flags": flags}
    return {
        "title": "t",
        "status": "published",
        "source": "s",
        "sources": {"s": "a"},
        "hardware": {"soc": "cpu", "nodes": 1, "dies_per_node": 1},
        "engine": {"name": "sglang", "version": "0.5.23", "flags": "sglang-0.5.23"},
        "checkpoint": {"format": "bf16", "target": "t"},
        "roles": {"serve": role},
    }


def test_a_recipe_is_read_with_its_values() -> None:
    flags = (
        read_recipe(recipe_with({"--context-length": "128k", "--tensor-parallel-size": 2}), "r").roles["serve"].flags
    )
    assert {name: setting.value for name, setting in flags.items()} == {"--context-length": 128000, "--tp-size": 2}
    with pytest.raises(RecipeError, match=r"r\.roles\.serve\.flags\.--tp-size: --tp-size is 'abc': must be a whole"):
        read_recipe(recipe_with({"--tp-size": "abc"}), "r")


class TestContainers:
    @pytest.mark.parametrize(
        ("path", "words"),
        [
            ("models/k3", "it must be an absolute path, to be mounted"),
            ("moonshotai/Kimi-K3", "it must be an absolute path"),
            ("/models:k3", "docker takes a colon for the end of the path"),
        ],
    )
    def test_paths(self, path: str, words: str) -> None:
        asked = launch(SGLANG, model_path=path)
        with pytest.raises(RecipeError, match=f"model_path is '{path}': .*{words}"):
            docker(asked, image="an/image")
        subprocess.run(["bash", "-n"], input=bash(asked), text=True, check=True)

    @pytest.mark.parametrize("image", ["--privileged", "two words", " "])
    def test_images(self, image: str) -> None:
        with pytest.raises(RecipeError, match="which is no name of an image"):
            docker(launch(SGLANG), image=image)
