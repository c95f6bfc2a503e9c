"""Tokenizers for the chat tests: the byte tokenizer of tiny checkpoints, and a stand-in for the published one."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.tiny import tiny_tokenizer
from kimi_k3_npu.tokenizer import Tokenizer, load_tokenizer

#: Two-byte tokens that a byte-pair encoder would like to make across boundaries of the format.
MERGES = [
    b"us",
    b"er",
    b"user",
    b'="',
    b'="_',
    b'"u',
    b'r"',
    b"<|",
    b"|>",
    b"op",
    b"en",
    b"open",
    b"\xe4\xbd",
    b"  ",
    b"11",
]


def write_tiktoken(
    folder: Path, *, size: int = 256 + len(MERGES), named: Mapping[int, tuple[str, bool]] | None = None
) -> Path:
    """A folder with a `tiktoken.model` of all bytes, some merges, and pairs of bytes up to `size` tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + MERGES
    known = set(tokens)
    longer = (bytes(pair) for n in (2, 3) for pair in product(range(256), repeat=n))
    while len(tokens) < size:
        token = next(longer)
        if token not in known:
            tokens.append(token)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens[:size])]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    if named is not None:
        decoder: dict[str, Any] = {
            str(i): {"content": name, "special": special} for i, (name, special) in named.items()
        }
        auto_map = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        settings = {"added_tokens_decoder": decoder, "auto_map": auto_map, "tokenizer_class": "TikTokenTokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Both kinds: "tiny" from a tokenizer.json, "published" from a tiktoken.model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "tiny").mkdir()
    tiny_tokenizer().save(str(folder / "tiny" / "tokenizer.json"))
    write_tiktoken(folder / "published")
    return {name: load_tokenizer(folder / name) for name in ("tiny", "published")}


@pytest.fixture(params=["tiny", "published"])
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


@pytest.fixture
def tiktoken_folder(tmp_path: Path) -> Callable[..., Path]:
    return lambda **options: write_tiktoken(tmp_path / "published", **options)
