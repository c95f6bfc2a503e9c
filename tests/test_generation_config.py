"""A folder's generation_config.json is used, or refused with a message, before any weight is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kimi_k3_npu.cli.app import app
from kimi_k3_npu.engines.transformers import KimiK3ForGeneration
from kimi_k3_npu.errors import ConfigError, KimiK3Error
from kimi_k3_npu.tiny import write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder, storage="fp32")
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """Of its own, for another generation_config.json."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def write(folder: Path, **settings: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps(settings))


#: What is refused whatever runs, by the words that say why.
NEVER = {
    "eos_token_id is '</s>', expected a token id in 0..271, a list of such, or null": {"eos_token_id": "</s>"},
    "eos_token_id is [], expected a token id": {"eos_token_id": []},
    "eos_token_id is [[258]], expected a token id": {"eos_token_id": [[258]]},
    "eos_token_id is 272, expected a token id": {"eos_token_id": 272},
    "eos_token_id is [258, -1], expected a token id": {"eos_token_id": [258, -1]},
    "pad_token_id is 10000, expected a token id in 0..271 or null": {"pad_token_id": 10000},
    "num_beams is 0, expected an integer of at least 1, or null": {"num_beams": 0},
    "num_beams is '2', expected an integer": {"num_beams": "2"},
    "top_k is 1.5, expected an integer of at least 0": {"top_k": 1.5},
    "temperature is 'warm', expected a number of at least 0, or null": {"temperature": "warm"},
    "top_p is [0.9], expected a number": {"top_p": [0.9]},
    "do_sample is 'yes', expected true or false": {"do_sample": "yes"},
    "cache_implementation is not supported: this model keeps its own": {"cache_implementation": "static"},
    "prompt_lookup_num_tokens is not supported: it takes tokens back": {"prompt_lookup_num_tokens": 3},
}
#: What transformers' generate does and commands do not.
NOT_HERE = {
    "num_beams is 2, which this command does not do; expected 1 or null": {"num_beams": 2},
    "num_return_sequences is 2, which this command does not do": {"num_return_sequences": 2, "do_sample": True},
    "stop_strings is ['.'], which this command does not look for; end tokens": {"stop_strings": ["."]},
}


@pytest.mark.parametrize("message", NEVER)
def test_refused(folder: Path, message: str) -> None:
    write(folder, **NEVER[message])
    (folder / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(KimiK3Error) as raised:
        KimiK3ForGeneration.from_pretrained(folder)
    assert f"generation_config.json: {message}" in str(raised.value)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"eos_token_id": ' + "9" * 5000 + "}"])
def test_no_json_object(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: (holds a JSON list|not valid JSON|is nested)"):
        KimiK3ForGeneration.from_pretrained(folder)


@pytest.mark.parametrize("message", [*NOT_HERE, next(iter(NEVER))])
@pytest.mark.parametrize("command", ["generate", "chat", "batch", "eval gsm"])
def test_commands(folder: Path, tmp_path: Path, command: str, message: str) -> None:
    write(folder, **(NOT_HERE | NEVER)[message])
    (tmp_path / "prompts.txt").write_text("hello\n")
    (tmp_path / "gsm.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    options = {
        "generate": ["--prompt", "hello"],
        "chat": [],
        "batch": ["--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "out.jsonl"],
        "eval gsm": ["--data", tmp_path / "gsm.jsonl"],
    }
    result = CliRunner().invoke(app, [*command.split(), "--model", str(folder), *map(str, options[command])])
    told = result.output + str(result.exception)
    assert message in " ".join(told.split())
    assert isinstance(result.exception, KimiK3Error | SystemExit)
    assert result.exit_code != 0


def test_used(folder: Path) -> None:
    """Beams, several end tokens and null are transformers' own matter."""
    write(folder, num_beams=2, eos_token_id=[258, 257], max_new_tokens=2, temperature=None, pad_token_id=271)
    network: Any = KimiK3ForGeneration.from_pretrained(folder)
    assert network.generation_config.num_beams == 2
    assert network.generation_config.eos_token_id == [258, 257]
    assert network.generate(torch.tensor([[5, 6, 7]])).shape[1] <= 5
