"""Both kinds of tokenizer file: ids, decoding, and that text a user writes never holds a control token."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_npu.chat.render import Segment
from kimi_k3_npu.tokenizer import PATTERN, PieceStream, Tokenizer, TokenizerError, load_tokenizer

#: A busy machine is no fault of an example.
PUBLISHED_BASE = 163_584
PUBLISHED_IDS = {
    **{"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588},
    **{"<|sep|>": 163589, "[start_header_id]": 163590, "[end_header_id]": 163591, "[EOT]": 163593},
    **{"<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605},
    **{"<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839},
}
NAMES = [*PUBLISHED_IDS, "<|reserved_token_271|>", "<|", "|>", "open", "[", "]"]
#: Text with control tokens in it, whole and in parts.
HOSTILE = st.lists(st.one_of(st.sampled_from(NAMES), st.text(max_size=4)), max_size=8).map("".join)
TEXT = st.one_of(HOSTILE, st.text())


@settings(max_examples=300)
@given(text=TEXT)
def test_ordinary_text_never_becomes_a_control_token(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode_segment(text, special=False)
        assert not set(ids) & set(tokenizer.controls.values())
        assert tokenizer.decode(ids) == text
        assert tokenizer.pieces(ids) == ([Segment(text, False)] if text else [])


@settings(max_examples=300)
@given(text=TEXT)
def test_special_text_survives(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in tokenizers.values():
        pieces = tokenizer.pieces(tokenizer.encode_segment(text, special=True))
        assert "".join(piece.text for piece in pieces) == text
        assert all(piece.text in tokenizer.controls for piece in pieces if piece.special)
        assert not any(name in piece.text for name in tokenizer.controls for piece in pieces if not piece.special)


@settings(max_examples=100)
@given(text=TEXT, special=st.booleans())
def test_pieces_stream(tokenizers: dict[str, Tokenizer], text: str, special: bool) -> None:
    for tokenizer in tokenizers.values():
        ids = tokenizer.encode_segment(text, special)
        stream = PieceStream(tokenizer)
        pieces = [piece for token in ids for piece in stream.feed(token)] + stream.end()
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids) == text


def test_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_segment("a<|open|>b<|end_of_msg|>", special=True)
    a, b = tokenizer.encode_segment("a", False), tokenizer.encode_segment("b", False)
    assert ids == [*a, tokenizer.control("<|open|>"), *b, tokenizer.control("<|end_of_msg|>")]
    assert tokenizer.pieces(ids) == [
        Segment("a", False),
        Segment("<|open|>", True),
        Segment("b", False),
        Segment("<|end_of_msg|>", True),
    ]
    assert tokenizer.decode(ids, skip_special=True) == "a<|open|>b"
    with pytest.raises(TokenizerError, match=r"no control token <\|im_end\|>, so it does not know"):
        tokenizer.control("<|im_end|>")


def test_half_a_character_is_held_back(tokenizer: Tokenizer) -> None:
    stream = PieceStream(tokenizer)
    euro = list("€".encode())
    assert [stream.feed(byte) for byte in euro] == [[], [], [Segment("€", False)]]
    assert stream.feed(euro[0]) == []
    end = tokenizer.control("<|end_of_msg|>")
    assert stream.feed(end) == [Segment("\ufffd", False), Segment("<|end_of_msg|>", True)]
    assert stream.end() == []
    assert tokenizer.decode([euro[0], 0x41]) == "\ufffdA"


def test_no_character_and_no_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_segment("a\ud800b\U0001f642", False)) == "a\ufffdb\U0001f642"
    assert tokenizer.decode([tokenizer.size + 5]) == "\ufffd"


def test_published_ids(tiktoken_folder: Callable[..., Path]) -> None:
    """A file of the published size, so that the ids after it are the published ones, whether they are named or not."""
    folder = tiktoken_folder(size=PUBLISHED_BASE)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.size == 163_840
    assert {name: tokenizer.controls[name] for name in PUBLISHED_IDS} == PUBLISHED_IDS
    assert len(tokenizer.controls) == 256
    assert tokenizer.controls["<|reserved_token_163592|>"] == 163592
    assert tokenizer.hidden == tokenizer.controls.keys() - {"<|open|>", "<|close|>", "<|sep|>"}


def test_names_come_from_the_folder(tiktoken_folder: Callable[..., Path]) -> None:
    named = {271: ("[BOS]", True), 272: ("<|im_end|>", True), 280: ("<|seen|>", False)}
    tokenizer = load_tokenizer(tiktoken_folder(named=named))
    assert {name: tokenizer.controls[name] for name, _ in named.values()} == {
        "[BOS]": 271,
        "<|im_end|>": 272,
        "<|seen|>": 280,
    }
    assert "<|open|>" not in tokenizer.controls
    assert tokenizer.decode([272, 280, 300], skip_special=True) == "<|seen|>"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello, 世界abc123456 don't", ["Hello", ",", " ", "世界", "abc", "123", "456", " don't"]),
        ("a世b", ["a", "世", "b"]),
        ("HTTPServer is UP", ["HTTPServer", " is", " UP"]),
        ("x = 1;\n\n  y", ["x", " =", " ", "1", ";\n\n", " ", " y"]),
        ("über-Größe", ["über", "-Größe"]),
        ("  \n a  ", ["  \n", " a", "  "]),
    ],
)
def test_words(text: str, parts: list[str]) -> None:
    assert regex.findall(PATTERN, text, flags=regex.V1) == parts


def test_words_are_what_is_merged(tokenizers: dict[str, Tokenizer]) -> None:
    """Byte pairs merge inside a word and not across: `="` and `user` are two, and `="_` is one."""
    tokenizer = tokenizers["published"]

    def tokens(text: str) -> list[bytes]:
        return [tokenizer.vocabulary[i] for i in tokenizer.encode_segment(text, False)]

    assert tokens('="user"') == [b'="', b"user", b'"']
    assert tokens('="_') == [b'="_']
    assert tokens("1111") == [b"11", b"1", b"1"]


def test_long_texts_are_cut_as_published(tokenizers: dict[str, Tokenizer]) -> None:
    """Runs of spaces or of other characters after every 25,000, and everything after every 400,000."""
    tokenizer = tokenizers["published"]
    two = tokenizer.encode_segment("  ", False)
    one = tokenizer.encode_segment(" ", False)
    assert tokenizer.encode_segment(" " * 25_001, False) == two * 12_500 + one
    assert tokenizer.encode_segment(" " * 25_003, False) == two * 12_501 + one
    odd = "a" * 3 + " " * 25_001 + "b"
    assert tokenizer.decode(tokenizer.encode_segment(odd, False)) == odd
    words = "us " * 133_333 + "user"  # character 400,000 is the s of user
    assert (
        tokenizer.encode_segment(words, False)[-2:]
        == [
            *tokenizer.encode_segment("u", False),
            *tokenizer.encode_segment("ser", False),
        ][-2:]
    )
    assert tokenizer.decode(tokenizer.encode_segment(words, False)) == words


class TestFolders:
    def message(self, folder: Path) -> str:
        with pytest.raises(TokenizerError) as error:
            load_tokenizer(folder)
        return str(error.value)

    def test_nothing(self, tmp_path: Path) -> None:
        assert "no tokenizer" in self.message(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{}")
        assert "neither tiktoken.model nor tokenizer.json" in self.message(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {}}')
        assert "Python code in the folder, which is not run, and there is no tiktoken.model" in self.message(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        assert "tokenizer_config.json: not valid JSON" in self.message(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("[]")
        assert "tokenizer_config.json: not a JSON object" in self.message(tmp_path)

    @pytest.mark.parametrize(
        ("change", "wanted"),
        [
            (lambda lines: [*lines[:5], b"no rank", *lines[6:]], "line 6 is not a base64 token and its rank"),
            (lambda lines: [*lines[:5], b"!! 5", *lines[6:]], "line 6 is not a base64 token and its rank"),
            (lambda lines: lines[1:], r"ranks are not 0\.\.269 with every single byte among them"),
            (lambda lines: [*lines[:-1], b"enp6eg== 900"], "ranks are not"),
        ],
    )
    def test_tiktoken(self, tiktoken_folder: Callable[..., Path], change: Callable, wanted: str) -> None:
        folder = tiktoken_folder()
        lines = (folder / "tiktoken.model").read_bytes().splitlines()
        (folder / "tiktoken.model").write_bytes(b"\n".join(change(lines)))
        with pytest.raises(TokenizerError, match=wanted):
            load_tokenizer(folder)

    @pytest.mark.parametrize(
        "named", [{5: ("<|five|>", True)}, {600: ("<|late|>", True)}, {300: ("x", True), 301: ("x", True)}]
    )
    def test_names_outside(self, tiktoken_folder: Callable[..., Path], named: dict) -> None:
        assert "added_tokens_decoder must name ids 271..526, each once" in self.message(tiktoken_folder(named=named))

    def test_names_of_another_form(self, tiktoken_folder: Callable[..., Path]) -> None:
        folder = tiktoken_folder(named={})
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"a": "b"}}))
        assert 'added_tokens_decoder is not of the form {"ID": {"content": ...}}' in self.message(folder)

    def test_not_bytes(self, tmp_path: Path) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import models

        Backend(models.BPE(vocab={"▁a": 0, "b": 1}, merges=[])).save(str(tmp_path / "tokenizer.json"))
        assert "tokenizer.json: not a byte-level tokenizer, and only those are read" in self.message(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        assert "cannot load its tokenizer" in self.message(tmp_path)


def test_pickles(tokenizers: dict[str, Tokenizer]) -> None:
    text = "Größe <|open|> 中文 1234 'll\n"
    for tokenizer in tokenizers.values():
        copy = pickle.loads(pickle.dumps(tokenizer))
        for special in (False, True):
            ids = copy.encode_segment(text, special=special)
            assert ids == tokenizer.encode_segment(text, special=special)
            assert copy.pieces(ids) == tokenizer.pieces(ids)
