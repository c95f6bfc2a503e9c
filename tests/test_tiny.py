"""The tiny checkpoint is a published checkpoint in everything but size and sense."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

import kimi_k3_npu.engines.transformers  # noqa: F401  registers kimi_k3
from kimi_k3_npu import KimiK3Config, KimiK3Error, load_model
from kimi_k3_npu.checkpoint.manifest import load_manifest
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tiny import CONTROL_TOKENS, TinyFormat, tiny_config, tiny_tokenizer, write_tiny

FORMATS: tuple[TinyFormat, ...] = ("mxfp4", "bf16", "fp32")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TinyFormat], Path]:
    """The tiny checkpoint of a format, written once."""
    folders: dict[TinyFormat, Path] = {}

    def find(storage: TinyFormat) -> Path:
        if storage not in folders:
            folders[storage] = tmp_path_factory.mktemp("tiny") / storage
            write_tiny(folders[storage], storage=storage)
        return folders[storage]

    return find


@pytest.mark.parametrize("storage", FORMATS)
def test_loads_and_runs(tiny: Callable, storage: TinyFormat) -> None:
    model = load_model(tiny(storage))
    assert model.dtype == (torch.float32 if storage == "fp32" else torch.bfloat16)
    assert model.experts == ("mxfp4" if storage == "mxfp4" else "plain")
    assert model.vision_tower is not None
    (logits,) = model.score([torch.arange(model.config.text.vocab_size)])
    assert logits.isfinite().all()
    # Printable ASCII is what it predicts, and not always the same.
    best = logits.argmax(-1)
    assert ((best >= 0x20) & (best < 0x7F)).all()
    assert len(best.unique()) > 20


def test_small(tiny: Callable) -> None:
    for storage in FORMATS[:2]:
        assert sum(file.stat().st_size for file in tiny(storage).iterdir()) < 5e6


def test_two_shards(tiny: Callable) -> None:
    shards = sorted(tiny("mxfp4").glob("*.safetensors"))
    assert [shard.name for shard in shards] == [f"model-0000{i}-of-000002.safetensors" for i in (1, 2)]


def test_published_names_and_dtypes(tiny: Callable) -> None:
    def pattern(name: str) -> str:
        for place, word in (("L", "layers"), ("E", "experts"), ("B", "blocks")):
            name = re.sub(rf"(?<={word}\.)\d+", f"{{{place}}}", name)
        return name

    entries = Checkpoint.open(tiny("mxfp4")).entries.values()
    found = {(pattern(entry.name), len(entry.shape), entry.dtype) for entry in entries}
    assert found == {(p.name, len(p.shape), p.dtype) for p in load_manifest("kimi-k3-mxfp4").patterns}


def test_a_log_is_padded(tiny: Callable) -> None:
    a_log = Checkpoint.open(tiny("mxfp4")).read("language_model.model.layers.0.self_attn.A_log")
    text = KimiK3Config.from_pretrained(tiny("mxfp4")).text
    assert a_log.shape == (text.kda_head_dim,)
    assert not a_log[text.kda_num_heads :].any()
    assert a_log[: text.kda_num_heads].all()


@pytest.mark.parametrize("storage", FORMATS)
def test_published_config_keys(storage: TinyFormat) -> None:
    published = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text())
    config = tiny_config(storage)
    absent = {"auto_map"} if storage == "mxfp4" else {"auto_map", "quantization_config"}
    assert published.keys() - config.keys() == {"auto_map"}
    assert published["text_config"].keys() - config["text_config"].keys() == absent
    assert published["text_config"]["linear_attn_config"].keys() == config["text_config"]["linear_attn_config"].keys()
    assert published["vision_config"].keys() == config["vision_config"].keys()


def test_repeatable(tmp_path: Path, tiny: Callable) -> None:
    for seed in (0, 1):
        write_tiny(tmp_path / str(seed), seed=seed)
    first, again, other = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tiny("mxfp4"), tmp_path / "0", tmp_path / "1")
    )
    assert first == again
    differ = {name for name in first if first[name] != other[name]}
    assert differ == {name for name in first if name.endswith(".safetensors")}


def test_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KimiK3Error, match="not empty"):
        write_tiny(tmp_path)
    with pytest.raises(KimiK3Error, match="is a file"):
        write_tiny(tmp_path / "notes.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    write_tiny(tmp_path / "new" / "folder")


@pytest.fixture(scope="module")
def tokenizer(tiny: Callable) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny("mxfp4"))


class TestTokenizer:
    def test_control_tokens_follow_the_bytes(self, tokenizer: PreTrainedTokenizerBase) -> None:
        assert tokenizer.convert_tokens_to_ids(list(CONTROL_TOKENS)) == list(range(256, 256 + len(CONTROL_TOKENS)))
        config = KimiK3Config.from_hf(tiny_config())
        assert len(tokenizer) == config.text.vocab_size
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        assert ids == (config.bos_token_id, config.eos_token_id, config.pad_token_id)
        assert (tokenizer.bos_token, tokenizer.eos_token) == ("[BOS]", "<|end_of_msg|>")
        assert tokenizer.decode(config.media_placeholder_token_id) == "<|media_pad|>"

    def test_text_is_bytes(self, tokenizer: PreTrainedTokenizerBase) -> None:
        text = " Größe:\n\t你好 🙂 "
        assert tokenizer(text).input_ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text

    def test_control_tokens_in_text(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = tokenizer("a<|open|>b<|end_of_msg|>").input_ids
        assert [i for i in ids if i >= 256] == [259, 258]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "a<|open|>b"


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_every_text_survives(text: str) -> None:
    tokenizer = tiny_tokenizer()
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.ids == list(text.encode()) or any(token in text for token in CONTROL_TOKENS)


def test_byte_alphabet() -> None:
    vocabulary = tiny_tokenizer().get_vocab(with_added_tokens=False)
    assert vocabulary == {char: byte for byte, char in bytes_to_unicode().items()}
