"""Values from the JSON files of a checkpoint folder, held against what they should be: one ConfigError names the file,
the key, the value found and the one wanted, whatever the file holds."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from pathlib import Path
from typing import Any

from kimi_k3_npu.errors import ConfigError

CONFIG_FILE = "config.json"

#: Far more than any such file; reading a larger one could take all memory.
MAX_FILE_BYTES = 16 * 2**20
#: The largest size of anything, but for these: far above any model, and far below what makes a list of them a problem.
MAX_SIZE = 2**20
_MAX_SIZES = {"vocab_size": 2**24, "num_hidden_layers": 4096, "vt_num_hidden_layers": 4096}
_MAX_NUMBER = 1e6
_MAY_BE_ZERO = {"num_experts", "num_shared_experts", "first_k_dense_replace"}
_KINDS: dict[str, tuple[Any, str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}


class _Short(reprlib.Repr):
    """Python's repr of anything, cut to a length that a message can bear."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = self.maxlevel = 4
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        return str(x) if x.bit_length() <= 128 else f"an integer of {x.bit_length()} bits"


shown = _Short().repr


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError naming what is missing or where the JSON breaks."""
    if not path.is_file():
        raise ConfigError(f"{path}: missing; a checkpoint folder needs its {path.name}")
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has {size} bytes, expected at most {MAX_FILE_BYTES}; it is not such a file")
    try:
        raw = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=lambda pairs: _without_duplicates(path.name, pairs)
        )
    except ConfigError:
        raise
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deep, expected a few levels") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds a JSON {type(raw).__name__}, expected an object")
    return raw


def check_value(name: str, annotation: str, value: Any) -> None:
    """Hold a value against the annotation of its field; numbers are positive unless said otherwise."""
    kind = annotation.removesuffix(" | None")
    if value is None:
        if kind == annotation:
            raise wrong(name, None, "a value is needed")
        return
    if kind not in _KINDS:  # a name or the layer kinds
        return
    types, words = _KINDS[kind]
    if not isinstance(value, types) or isinstance(value, bool) != (kind == "bool"):
        raise wrong(name, value, f"expected {words}")
    if kind != "bool":
        _check_range(name, kind, value)


def check_token_ids(name: str, value: Any, vocab_size: int, *, file: str = CONFIG_FILE, several: bool = False) -> None:
    """A token id, None, or with `several` a list of at least one."""
    value = list(value) if isinstance(value, tuple) else value
    ids = value if several and isinstance(value, list) else [value]
    wanted = f"expected a token id in 0..{vocab_size - 1}{', a list of such,' if several else ''} or null"
    if value is not None and not (ids and all(type(token) is int and 0 <= token < vocab_size for token in ids)):
        raise wrong(name, value, wanted, file)


def check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise wrong(name, value, "expected true or false")


def wrong(name: str, value: Any, wanted: str, file: str = CONFIG_FILE) -> ConfigError:
    """The error for a value; `wanted` says what would be right."""
    return ConfigError(f"{file}: {name} is {'null' if value is None else shown(value)}, {wanted}")


def _check_range(name: str, kind: str, value: float) -> None:
    field = name.rpartition(".")[2]
    largest = _MAX_NUMBER if kind == "float" else _MAX_SIZES.get(field, MAX_SIZE)
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(name, value, "must be finite")
    if field == "gate_lower_bound":
        if value < -largest:
            raise wrong(name, value, f"must be at least {-largest:g}")
    elif value <= 0 and not (value == 0 and field in _MAY_BE_ZERO):
        raise wrong(name, value, "must be positive")
    if field.endswith("_eps") and value >= 1:
        raise wrong(name, value, "must be below 1")
    if value > largest:
        raise wrong(name, value, f"must be at most {largest:g}" if kind == "float" else f"must be at most {largest}")


def _without_duplicates(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON keeps the last of two values in silence."""
    if twice := sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1):
        raise ConfigError(f"{file}: given twice: {', '.join(twice[:20])}; keep one of each")
    return dict(pairs)


def frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
