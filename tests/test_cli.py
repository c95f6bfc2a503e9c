"""Every command: what it prints, and that every mistake ends in one message and an exit code."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3_npu import __version__, load_model
from kimi_k3_npu.checkpoint.convert import convert
from kimi_k3_npu.cli import main
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tiny import write_tiny

INDEX = "model.safetensors.index.json"
LAYER = "language_model.model.layers.1."


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the command line in this process. Nothing that it can end with is a traceback."""

    def run(*args: object) -> Result:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        result = Result(int(end.value.code or 0), *capfd.readouterr())
        assert "Traceback" not in result.out + result.err
        return result

    return run


@pytest.fixture
def fails(run: Callable[..., Result]) -> Callable[..., str]:
    """Run a command that must fail for a reason the user can correct; returns the one message that it prints."""

    def fails(*args: object) -> str:
        result = run(*args)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: ")
        assert result.err.count("error: ") == 1
        return result.err

    return fails


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder)
    return folder


@pytest.fixture
def broken(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to break."""
    return Path(shutil.copytree(tiny, tmp_path / "broken"))


def change_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the tensors of the first shard, and bring the index in line."""
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    before = load_file(shard)
    after = dict(before)
    change(after)
    save_file(after, shard)
    index = json.loads((folder / INDEX).read_text())
    kept = {name: file for name, file in index["weight_map"].items() if name not in before}
    index["weight_map"] = kept | dict.fromkeys(after, shard.name)
    (folder / INDEX).write_text(json.dumps(index))


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class TestProgram:
    def test_version(self, run: Callable[..., Result]) -> None:
        assert run("--version") == Result(0, f"{__version__}\n", "")

    @pytest.mark.parametrize("args", [(), ("generate",), ("info",), ("weights",), ("weights", "tiny")])
    def test_help(self, run: Callable[..., Result], args: tuple[str, ...]) -> None:
        result = run(*args, "--help")
        assert result.code == 0
        assert "Usage" in result.out
        assert not result.err

    @pytest.mark.parametrize(
        "args",
        [
            ("nonsense",),
            ("weights", "nonsense"),
            ("info",),
            ("generate", "--prompt", "x"),
            ("generate", "--model", "x"),
            ("generate", "--model", "x", "--prompt", "x", "--token-ids", "1"),
            ("generate", "--model", "x", "--token-ids", "1,x"),
            ("generate", "--model", "x", "--token-ids", "1", "--max-new-tokens", "0"),
            ("generate", "--model", "x", "--token-ids", "1", "--temperature", "-1"),
            ("generate", "--model", "x", "--token-ids", "1", "--temperature", "1", "--top-p", "1.5"),
            ("generate", "--model", "x", "--token-ids", "1", "--temperature", "nan"),
            ("generate", "--model", "x", "--token-ids", "1", "--top-p", "0.5"),
            ("generate", "--model", "x", "--token-ids", "1", "--seed", "-1"),
            ("generate", "--model", "x", "--token-ids", "1", "--stream", "--json"),
            ("generate", "--model", "x", "--token-ids", "1", "--expert-weights", "int8"),
            ("weights", "tiny", "x", "--format", "int8"),
            ("weights", "tiny", "x", "--seed", "-1"),
        ],
    )
    def test_wrong_usage(self, run: Callable[..., Result], args: tuple[str, ...]) -> None:
        result = run(*args)
        assert result.code == 2
        assert not result.out
        assert "Usage" in result.err

    @pytest.mark.slow
    def test_as_a_module(self, tiny: Path) -> None:
        """In a process of its own, where nothing is a terminal: no progress bars, and no traceback for an error."""
        generate = [sys.executable, "-m", "kimi_k3_npu", "generate", "--model", str(tiny), "--max-new-tokens", "3"]
        good = subprocess.run([*generate, "--prompt", "hello"], capture_output=True, text=True)
        assert (good.returncode, good.stderr) == (0, "")
        assert len(good.stdout) == 4
        bad = subprocess.run([*generate, "--prompt", ""], capture_output=True, text=True)
        assert (bad.returncode, bad.stdout) == (1, "")
        assert bad.stderr == "error: the prompt is empty; generation needs at least one token to continue\n"

    @pytest.mark.slow
    def test_progress_on_a_terminal(self, tiny: Path) -> None:
        terminal, end = pty.openpty()
        command = [sys.executable, "-m", "kimi_k3_npu", "generate", "--model", str(tiny), "--prompt", "hello"]
        command += ["--max-new-tokens", "8"]
        process = subprocess.Popen(command, stderr=end, stdout=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
        os.close(end)
        shown = b""
        try:
            while chunk := os.read(terminal, 65536):
                shown += chunk
        except OSError:  # the other end is closed
            pass
        finally:
            os.close(terminal)
        out, _ = process.communicate()
        assert process.returncode == 0
        assert b"loading" in shown
        assert b"generating" in shown
        assert b"8/8" in shown
        assert b"\x1b" not in out

    def test_a_bug_keeps_its_traceback(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def bug(*args: Any) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr("kimi_k3_npu.cli.info.parameter_counts", bug)
        with pytest.raises(ValueError, match="a bug"):
            main(["info", str(tiny)])

    def test_unreadable_file(self, tiny: Path, fails: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
        def denied(*args: Any, **kwargs: Any) -> str:
            raise PermissionError(13, "Permission denied", "config.json")

        monkeypatch.setattr(Path, "read_text", denied)
        assert fails("info", tiny) == "error: config.json: Permission denied\n"

    def test_warnings_are_one_line(self, broken: Path, run: Callable[..., Result]) -> None:
        config = json.loads((broken / "config.json").read_text())
        config["text_config"]["new_knob"] = 3
        (broken / "config.json").write_text(json.dumps(config))
        result = run("info", broken)
        assert result.code == 0
        assert result.err.startswith("warning: config.json: keys this version does not know: new_knob")
        assert result.err.count("\n") == 1


class TestGenerate:
    @pytest.fixture
    def generate(self, run: Callable[..., Result], tiny: Path) -> Callable[..., str]:
        def generate(*args: object) -> str:
            result = run("generate", "--model", tiny, "--max-new-tokens", 8, *args)
            assert (result.code, result.err) == (0, "")
            return result.out

        return generate

    @pytest.mark.parametrize("name", ["k3", "k3-deep", "k3-mxfp4", "k3-router", "kimi-linear", "kimi-linear-flat"])
    def test_expected_tokens(self, run: Callable[..., Result], oracle: Callable, name: str) -> None:
        source = oracle(name)
        for prompt, greedy8 in zip(source.expected.prompts, source.expected.greedy8, strict=True):
            ids = ",".join(map(str, prompt.tolist()))
            result = run("generate", "--model", source.folder, "--token-ids", ids, "--max-new-tokens", 8)
            assert result == Result(0, ",".join(map(str, greedy8.tolist())) + "\n", "")

    def test_text(self, generate: Callable[..., str], tiny: Path) -> None:
        model = load_model(tiny, dtype=torch.float32)
        ids = list(b"What is this?")
        for _ in range(8):
            ids.append(int(model.score([torch.tensor(ids)])[0][-1].argmax()))
        assert generate("--prompt", "What is this?", "--dtype", "float32") == bytes(ids[13:]).decode() + "\n"

    def test_json(self, generate: Callable[..., str]) -> None:
        result = json.loads(generate("--prompt", "Größe", "--json"))
        assert list(result) == ["prompt_ids", "token_ids", "text", "finish_reason", "seconds", "tokens_per_second"]
        assert result["prompt_ids"] == list("Größe".encode())
        assert bytes(result["token_ids"]).decode() == result["text"]
        assert (len(result["token_ids"]), result["finish_reason"]) == (8, "length")
        assert result["seconds"] * result["tokens_per_second"] == pytest.approx(8, rel=0.1)

        by_ids = json.loads(generate("--token-ids", ",".join(map(str, result["prompt_ids"])), "--json"))
        assert by_ids["text"] is None
        assert by_ids["token_ids"] == result["token_ids"]

    def test_stops_at_the_end_of_message(self, broken: Path, generate: Callable[..., str]) -> None:
        ids = json.loads(generate("--prompt", "hello", "--json"))["token_ids"]
        change_json(broken / "generation_config.json", eos_token_id=ids[2])
        result = json.loads(generate("--model", broken, "--prompt", "hello", "--json"))
        assert result["token_ids"] == ids[: ids.index(ids[2]) + 1]
        assert result["finish_reason"] == "stop"

    def test_streams_the_same(self, generate: Callable[..., str]) -> None:
        for prompt in (("--prompt", "hello"), ("--token-ids", "1,2,3")):
            assert generate(*prompt, "--stream") == generate(*prompt)

    def test_sampling(self, generate: Callable[..., str]) -> None:
        greedy = generate("--prompt", "hello")
        sampled = [generate("--prompt", "hello", "--temperature", 2, "--seed", seed) for seed in (1, 1, 2)]
        assert sampled[0] == sampled[1]
        assert len({greedy, *sampled}) == 3
        assert generate("--prompt", "hello", "--temperature", 2, "--top-p", 1e-6) == greedy
        assert generate("--prompt", "hello", "--temperature", 1e-45) == greedy

    def test_sampling_leaves_no_token_out(self, generate: Callable[..., str], tiny: Path) -> None:
        """transformers' own default is the 50 likeliest tokens."""
        ids = json.loads(generate("--prompt", "hello", "--temperature", 1e6, "--seed", 0, "--json"))["token_ids"]
        (logits,) = load_model(tiny).score([torch.tensor([*b"hello", *ids])])
        likelier = [int((row > row[i]).sum()) for row, i in zip(logits[4:], ids, strict=False)]
        assert max(likelier) > 100

    def test_the_folder_can_limit_sampling(self, broken: Path, generate: Callable[..., str]) -> None:
        change_json(broken / "generation_config.json", do_sample=True, top_k=1, temperature=0.5, top_p=0.9)
        greedy = generate("--model", broken, "--prompt", "hello")
        assert greedy == generate("--prompt", "hello")
        assert generate("--model", broken, "--prompt", "hello", "--temperature", 5) == greedy

    def test_weights_in_memory(self, generate: Callable[..., str]) -> None:
        packed = generate("--prompt", "hello", "--expert-weights", "packed")
        assert generate("--prompt", "hello", "--expert-weights", "bf16") == packed


class TestMistakes:
    """Each is one message that names the thing."""

    @pytest.fixture
    def message(self, fails: Callable[..., str]) -> Callable[[Path], str]:
        return lambda folder: fails("generate", "--model", folder, "--token-ids", "1,2,3")

    def test_what_is_inside_the_weights(self, run: Callable[..., Result], message: Callable, broken: Path) -> None:
        name = "language_model.model.layers.0.input_layernorm.weight"
        change_tensors(broken, lambda tensors: tensors[name].view(-1)[:1].fill_(torch.nan))
        assert f"not finite (1):\n    {name}: 1 of" in message(broken)
        command = ("generate", "--model", broken, "--token-ids", "1,2,3", "--max-new-tokens", 1)
        assert run(*command, "--no-scan").code == 0

    @pytest.mark.parametrize("command", [("info",), ("generate", "--token-ids", "1", "--model")])
    def test_folder(self, fails: Callable[..., str], broken: Path, command: tuple[str, ...]) -> None:
        (broken / "config.json").write_text('{"model_type": "kimi_k3",')
        assert "config.json: not valid JSON (Expecting property name" in fails(*command, broken)
        (broken / "config.json").write_text('{"model_type": "llama"}')
        assert "model_type is 'llama'; this package serves kimi_k3 and kimi_linear" in fails(*command, broken)
        (broken / "config.json").unlink()
        assert fails(*command, broken) == (
            f"error: {broken}/config.json: missing; a checkpoint folder needs its config.json\n"
        )
        assert f"{broken}/nowhere: no such folder" in fails(*command, broken / "nowhere")

    @pytest.mark.parametrize("command", [("info",), ("generate", "--token-ids", "1", "--model")])
    def test_shards(self, fails: Callable[..., str], broken: Path, command: tuple[str, ...]) -> None:
        first, second = sorted(broken.glob("model-*.safetensors"))
        first.write_bytes(first.read_bytes()[:-100])
        second.unlink()
        message = fails(*command, broken)
        assert "2 faults in this checkpoint" in message
        assert f"truncated or not safetensors (1):\n    {first.name}: the tensors end at byte" in message
        assert f"missing shard (1):\n    {second.name}: " in message

    def test_no_shards(self, message: Callable[[Path], str], broken: Path) -> None:
        for file in broken.glob("*.safetensors*"):
            file.unlink()
        assert "no safetensors checkpoint" in message(broken)

    def test_tensors(self, message: Callable[[Path], str], broken: Path) -> None:
        """All faults are listed together, by kind."""
        moe = f"{LAYER}block_sparse_moe.gate.weight"

        def change(tensors: dict[str, Any]) -> None:
            del tensors[f"{LAYER}self_attn.q_proj.weight"]
            tensors[f"{LAYER}self_attn.rotary.inv_freq"] = torch.zeros(4)
            tensors[moe.replace("block_sparse_moe", "mlp")] = tensors[moe].clone()
            tensors[f"{LAYER}self_attn.k_proj.weight"] = torch.zeros(4, 128, dtype=torch.bfloat16)
            tensors[f"{LAYER}self_attn.v_proj.weight"] = torch.zeros(128, 128, dtype=torch.int8)

        change_tensors(broken, change)
        lines = message(broken).splitlines()
        assert lines[0].endswith("5 faults in this checkpoint")
        faults = dict(zip(lines[1::2], lines[2::2], strict=True))
        assert faults["  missing tensor (1):"].startswith(f"    {LAYER}self_attn.q_proj.weight: ")
        assert faults["  unknown tensor (1):"].startswith(f"    {LAYER}self_attn.rotary.inv_freq: ")
        assert moe in faults["  tensor given twice (1):"]
        assert faults["  wrong shape (1):"] == f"    {LAYER}self_attn.k_proj.weight: is [4, 128], expected [128, 128]"
        assert faults["  wrong dtype (1):"].startswith(f"    {LAYER}self_attn.v_proj.weight: is int8, expected")

    def test_non_zero_padding(self, message: Callable[[Path], str], broken: Path) -> None:
        a_log = f"{LAYER}self_attn.A_log"
        change_tensors(broken, lambda tensors: tensors[a_log][-1:].fill_(0.5))
        assert f"{a_log}: 1 non-zero values after the first 8 (heads), expected padding" in message(broken)

    def test_tensor_in_two_shards(self, message: Callable[[Path], str], broken: Path) -> None:
        first, second = sorted(broken.glob("model-*.safetensors"))
        name = f"{LAYER}self_attn.A_log"
        save_file(load_file(second) | {name: load_file(first)[name]}, second)
        assert f"duplicate tensor (1):\n    {name}: in {first.name} and {second.name}" in message(broken)

    @pytest.mark.parametrize(
        ("args", "wanted"),
        [
            (("--prompt", ""), "the prompt is empty"),
            (("--token-ids", ""), "the prompt is empty"),
            (("--token-ids", "1,272"), "token id 272, outside the vocabulary 0..271"),
            (("--token-ids", "-1"), "token id -1, outside the vocabulary 0..271"),
        ],
    )
    def test_prompt(self, fails: Callable[..., str], tiny: Path, args: tuple[str, str], wanted: str) -> None:
        assert wanted in fails("generate", "--model", tiny, *args)

    def test_expert_weights(self, fails: Callable[..., str], oracle: Callable) -> None:
        args = ("generate", "--model", oracle("k3").folder, "--token-ids", "1", "--expert-weights", "packed")
        assert "its experts are not packed" in fails(*args)

    def test_dtype(self, fails: Callable[..., str], tiny: Path) -> None:
        message = fails("generate", "--model", tiny, "--token-ids", "1", "--dtype", "float16")
        assert "MXFP4 experts do not expand to float16; use dtype bfloat16 or float32" in message

    def test_tokenizer(self, fails: Callable[..., str], broken: Path) -> None:
        def message() -> str:
            text = fails("generate", "--model", broken, "--prompt", "hello")
            assert text.endswith("; --token-ids works without one\n")
            return text

        (broken / "tokenizer.json").write_text('{"version": ')
        assert "cannot load its tokenizer" in message()
        (broken / "tokenizer.json").unlink()
        (broken / "tokenizer_config.json").write_text('{"tokenizer_class": ')
        assert "tokenizer_config.json: not valid JSON" in message()
        settings = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
        (broken / "tokenizer_config.json").write_text(json.dumps(settings))
        assert "its tokenizer is Python code in the folder, which is not run" in message()
        (broken / "tokenizer_config.json").unlink()
        assert "no tokenizer (tokenizer.json or tokenizer_config.json) in this folder" in message()


class TestInfo:
    def test_counts_are_the_model_s(self, run: Callable[..., Result], oracle: Callable, tiny: Path) -> None:
        for folder in [tiny, *(oracle(name).folder for name in ("k3", "k3-deep", "k3-vision", "kimi-linear-flat"))]:
            result = json.loads(run("info", folder, "--json").out)
            counts = result["parameters"]
            model = load_model(folder, expert_weights="bf16")
            total = sum(parameter.numel() for parameter in model.parameters())
            assert counts["total"] == total
            assert counts["embedding"] == counts["head"] == model.embed_tokens.weight.numel()
            experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
            assert counts["routed experts"] == experts
            blocks = [count for block, count in counts.items() if block not in ("total", "active_per_token")]
            assert sum(blocks) == total
            text = model.config.text
            idle = (
                counts["embedding"]
                + counts["vision"]
                + experts
                - experts * text.num_experts_per_token // text.num_experts
            )
            assert counts["active_per_token"] == total - idle

    def test_stored(self, run: Callable[..., Result], tiny: Path, oracle: Callable) -> None:
        weights = json.loads(run("info", tiny, "--json").out)["weights"]
        shards = [load_file(file) for file in tiny.glob("*.safetensors")]
        assert weights["shards"] == len(shards) == 2
        assert weights["tensors"] == sum(map(len, shards))
        assert weights["bytes"] == sum(tensor.nbytes for shard in shards for tensor in shard.values())
        assert sum(weights["dtypes"].values()) == weights["bytes"]
        assert weights["dtypes"].keys() == {"bfloat16", "float32", "uint8"}
        formats = {"k3": "plain", "k3-mxfp4": "MXFP4 experts", "k3-w4a8": "ModelSlim", "kimi-linear-flat": "plain"}
        for name, layout in formats.items():
            assert json.loads(run("info", oracle(name).folder, "--json").out)["weights"]["format"] == layout

    def test_the_format_of_a_converted_folder(
        self, oracle: Callable[[str], Any], run: Callable, tmp_path: Path
    ) -> None:
        convert(oracle("k3-mxfp4").folder, tmp_path / "out", "int4x2")
        assert json.loads(run("info", tmp_path / "out", "--json").out)["weights"]["format"] == "int4x2 experts"

    def test_words(self, run: Callable[..., Result], tiny: Path, oracle: Callable) -> None:
        words = run("info", tiny).out
        for part in (
            "attention residuals over 3 blocks of 4 layers",
            "6 layers: 8 heads of 16, convolution over 4 tokens, log-decay above -5, full-rank output gate",
            "3 layers: 8 heads, keys 16 + 8 shared, values 16, latent 64, queries of rank 64, output gate",
            "layers 3, 7, 8, counted from 0",
            "8 layers: 16 experts of inner width 32, 4 a token, in a latent space of 64, normed, 2 shared experts",
            "SiTU, beta 4, linear beta 25",
            "MXFP4 experts: 1,020 tensors in 2 shards, 3.4 MB",
        ):
            assert part in words
        words = run("info", oracle("kimi-linear-flat").folder).out
        for part in ("plain additions", "softplus log-decay, low-rank", "no output gate", "SiLU"):
            assert part in words

    def test_full_size_without_weights(self, run: Callable[..., Result], tmp_path: Path) -> None:
        shutil.copy(resource_path("weights", "manifests", "kimi-k3-config.json"), tmp_path / "config.json")
        result = json.loads(run("info", tmp_path, "--json").out)
        assert result["weights"] is None
        billions = {block: round(count / 1e9, 2) for block, count in result["parameters"].items()}
        assert billions == {
            "embedding": 1.17,
            "KDA": 30.62,
            "MLA": 5.57,
            "dense MLP": 0.73,
            "routed experts": 2722.74,
            "shared experts": 12.16,
            "router": 0.59,
            "latent projections": 4.73,
            "norms and mixers": 0.0,
            "vision": 0.45,
            "head": 1.17,
            "total": 2779.93,
            "active_per_token": 104.19,
        }
        words = run("info", tmp_path).out
        assert "kimi_k3, 2,779.9 B parameters, 104.2 B active per token" in words
        assert "none in this folder, only config.json" in words


class TestWeightsTiny:
    def test_writes(self, run: Callable[..., Result], tmp_path: Path) -> None:
        folder = tmp_path / "made" / "here"
        result = run("weights", "tiny", folder, "--format", "fp32", "--seed", 5)
        assert (result.code, result.err) == (0, "")
        assert f"{folder}: 9.3 MB, fp32, random weights (seed 5)" in result.out
        assert load_model(folder).dtype == torch.float32

    def test_overwrites_nothing(self, fails: Callable[..., str], tiny: Path) -> None:
        assert "not empty, and nothing is overwritten" in fails("weights", "tiny", tiny)
