"""The tokenizer of a checkpoint folder: the published `tiktoken.model`, or a byte-level `tokenizer.json`.

Control tokens come from segments that are marked to have them (`encode_segment`), and from nowhere else: ordinary text
is encoded without looking for any, so that what a user writes is never markup. Decoding keeps the two apart as well.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_k3_npu.chat.render import Segment
from kimi_k3_npu.errors import KimiK3Error

if TYPE_CHECKING:
    import tiktoken
    import tokenizers

TIKTOKEN_FILE, JSON_FILE, SETTINGS_FILE = "tiktoken.model", "tokenizer.json", "tokenizer_config.json"

#: The control tokens are the 256 ids after the last rank. Names come from tokenizer_config.json's added_tokens_decoder;
#: without one, from here (K3's, by place). A place without a name is `<|reserved_token_ID|>`.
NUM_CONTROL_TOKENS = 256
PUBLISHED_NAMES = {
    **{0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>"},
    **{6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]"},
    **{18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>"},
    **{65: "<osagent_mode>", 254: "[UNK]", 255: "[PAD]"},
}
#: Control tokens that decoded text shows even where special tokens are left out.
VISIBLE_CONTROL_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")

#: How Kimi-K2 and K3 cut text before the byte pairs are merged: Chinese characters by themselves, words with a
#: leading sign and an English contraction, up to three digits, signs, white space.
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}*{_WORD[1]}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD[0]}+{_WORD[1]}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
#: The published tokenizer cuts very long texts here before anything else, which decides the ids around the cuts.
_TEXT_LIMIT, _RUN_LIMIT = 400_000, 25_000
_LONG_RUN = re.compile(rf"\s{{{_RUN_LIMIT + 1},}}|\S{{{_RUN_LIMIT + 1},}}")


class TokenizerError(KimiK3Error):
    """A folder has no tokenizer that can be read, or not the one that is needed."""


class Tokenizer:
    """Text to token ids and back.

    Args:
        ordinary: Encodes text that has no control tokens.
        vocabulary: The bytes of each ordinary token.
        controls: Id of each control token.
        hidden: Control tokens that `decode` can leave out.
    """

    def __init__(
        self,
        ordinary: Callable[[str], list[int]],
        vocabulary: Mapping[int, bytes],
        controls: Mapping[str, int],
        hidden: Collection[str],
    ) -> None:
        self.controls, self.hidden = dict(controls), frozenset(hidden)
        self.vocabulary = vocabulary
        self._ordinary = ordinary
        self._names = {token: name for name, token in controls.items()}
        longest_first = sorted(controls, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if controls else "(?!)")

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max((*self.vocabulary, *self._names), default=-1) + 1

    def encode_segment(self, text: str, special: bool) -> list[int]:
        """Token ids of `text`; its control tokens count as such only when it is `special`.

        A surrogate without its partner, which is no character, becomes U+FFFD.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not special:
            return self._ordinary(text)
        ids: list[int] = []
        for part in self._control.split(text):
            ids += [self.controls[part]] if part in self.controls else self._ordinary(part)
        return ids

    def control(self, name: str) -> int:
        """The id of a control token. Raises TokenizerError when there is none of that name."""
        if name not in self.controls:
            raise TokenizerError(
                f"this tokenizer has no control token {name}, so it does not know Kimi-K3's chat format"
            )
        return self.controls[name]

    def name(self, token: int) -> str | None:
        """The control token with this id, None for an ordinary one."""
        return self._names.get(token)

    def pieces(self, ids: Iterable[int]) -> list[Segment]:
        """Runs of text, and control tokens each by itself, marked `special`. Bytes that are no UTF-8 become U+FFFD."""
        stream = PieceStream(self)
        pieces = [piece for token in ids for piece in stream.feed(token)] + stream.end()
        merged: list[Segment] = []
        for piece in pieces:
            if merged and not piece.special and not merged[-1].special:
                merged[-1] = Segment(merged[-1].text + piece.text, False)
            else:
                merged.append(piece)
        return merged

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of `ids`, its control tokens included, or without the hidden ones."""
        left_out = self.hidden if skip_special else ()
        return "".join(piece.text for piece in self.pieces(ids) if not (piece.special and piece.text in left_out))


class PieceStream:
    """Token ids to pieces as they come. The bytes of a character that is not whole yet are held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> list[Segment]:
        """What the next token completes."""
        if name := self._tokenizer.name(token):
            return [*self.end(), Segment(name, True)]
        # A model's vocabulary can be larger than its tokenizer's: such an id has no text.
        text = self._characters.decode(self._tokenizer.vocabulary.get(token, b"\xff"))
        return [Segment(text, False)] if text else []

    def end(self) -> list[Segment]:
        """What was held back."""
        text = self._characters.decode(b"", final=True)
        self._characters.reset()
        return [Segment(text, False)] if text else []


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder: `tiktoken.model`, or else `tokenizer.json`. Code in the folder is not run.

    Raises:
        TokenizerError: There is neither, or what is there cannot be read.
    """
    folder = Path(folder)
    if (folder / TIKTOKEN_FILE).is_file():
        return _from_tiktoken(folder / TIKTOKEN_FILE, read_settings(folder))
    if (folder / JSON_FILE).is_file():
        return _from_json(folder / JSON_FILE)
    if not (folder / SETTINGS_FILE).is_file():
        raise TokenizerError(
            f"{folder}: no tokenizer ({JSON_FILE} or {SETTINGS_FILE}) in this folder, and no {TIKTOKEN_FILE}"
        )
    if "auto_map" in read_settings(folder):
        raise TokenizerError(
            f"{folder}: its tokenizer is Python code in the folder, which is not run, and there is no {TIKTOKEN_FILE}"
        )
    raise TokenizerError(f"{folder}: has a {SETTINGS_FILE}, but neither {TIKTOKEN_FILE} nor {JSON_FILE}")


def read_settings(folder: Path) -> dict[str, Any]:
    """`folder/tokenizer_config.json`, empty when there is none. Raises TokenizerError when it is no JSON object."""
    file = folder / SETTINGS_FILE
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise TokenizerError(f"{file}: not a JSON object")
    return settings


def _from_tiktoken(file: Path, settings: Mapping[str, Any]) -> Tokenizer:
    import tiktoken

    ranks = _read_ranks(file)
    base = len(ranks)
    if sorted(ranks.values()) != list(range(base)) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"{file}: ranks are not 0..{base - 1} with every single byte among them")
    names, visible = _control_names(file, settings, base)
    last = base + NUM_CONTROL_TOKENS
    controls = {names.get(token, f"<|reserved_token_{token}|>"): token for token in range(base, last)}
    if len(controls) < NUM_CONTROL_TOKENS or not names.keys() <= set(controls.values()):
        raise TokenizerError(
            f"{file.with_name(SETTINGS_FILE)}: added_tokens_decoder must name ids {base}..{last - 1}, each once; they "
            f"follow the {base} ranks of {file.name}"
        )
    encoding = tiktoken.Encoding(
        file.name, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=controls, explicit_n_vocab=last
    )

    return Tokenizer(
        _TiktokenText(encoding), {rank: token for token, rank in ranks.items()}, controls, set(controls) - visible
    )


@dataclass(frozen=True)
class _TiktokenText:
    """Encodes text without control tokens. A class, as what a tokenizer holds is pickled with it."""

    encoding: tiktoken.Encoding

    def __call__(self, text: str) -> list[int]:
        return [token for part in _short_parts(text) for token in self.encoding.encode_ordinary(part)]


def _read_ranks(file: Path) -> dict[bytes, int]:
    """Lines of a base64 token and its rank. tiktoken's own reader would keep a copy outside the folder."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(f"{file}: line {number} is not a base64 token and its rank") from None
    return ranks


def _control_names(file: Path, settings: Mapping[str, Any], base: int) -> tuple[dict[int, str], set[str]]:
    """Names of control tokens by id, and those that are not special, so that decoded text always shows them."""
    decoder = settings.get("added_tokens_decoder")
    if not decoder:
        return {base + place: name for place, name in PUBLISHED_NAMES.items()}, set(VISIBLE_CONTROL_TOKENS)
    try:
        names = {int(token): str(entry["content"]) for token, entry in decoder.items()}
        return names, {str(entry["content"]) for entry in decoder.values() if not entry.get("special", True)}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TokenizerError(
            f'{file.with_name(SETTINGS_FILE)}: added_tokens_decoder is not of the form {{"ID": {{"content": ...}}}}'
        ) from None


def _short_parts(text: str) -> Iterator[str]:
    """`text` cut as published: every 400,000 characters, and every 25,000 of a run that is all, or no, white space."""
    for start in range(0, len(text), _TEXT_LIMIT):
        part, done = text[start : start + _TEXT_LIMIT], 0
        for run in _LONG_RUN.finditer(part):
            for cut in range(run.start() + _RUN_LIMIT, run.end(), _RUN_LIMIT):
                yield part[done:cut]
                done = cut
        yield part[done:]


def _from_json(file: Path) -> Tokenizer:
    import tokenizers

    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        added = raw.pop("added_tokens", None) or []
        # Without its added tokens a tokenizer cannot find any in a text, whatever their flags.
        model = tokenizers.Tokenizer.from_str(json.dumps(raw | {"added_tokens": [], "post_processor": None}))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise TokenizerError(f"{file.parent}: cannot load its tokenizer: {error}") from None
    controls = {entry["content"]: entry["id"] for entry in added}
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    try:
        vocabulary = {
            token: bytes(byte_of[character] for character in text)
            for text, token in model.get_vocab(with_added_tokens=False).items()
            if text not in controls
        }
    except KeyError:
        raise TokenizerError(f"{file}: not a byte-level tokenizer, and only those are read") from None
    hidden = {entry["content"] for entry in added if entry.get("special")}
    return Tokenizer(_JsonText(model), vocabulary, controls, hidden)


@dataclass(frozen=True)
class _JsonText:
    """As `_TiktokenText`, by the tokenizers library."""

    model: tokenizers.Tokenizer

    def __call__(self, text: str) -> list[int]:
        return self.model.encode(text, add_special_tokens=False).ids


def byte_alphabet() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself where printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
