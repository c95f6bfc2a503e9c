"""Whatever stands in config.json, it is a configuration or one ConfigError, at once."""

from __future__ import annotations

import copy
import json
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import ConfigError
from kimi_k3_npu.resources import resource_path

ORACLES = Path(__file__).with_name("oracle")
FILES = {
    "published": resource_path("weights", "manifests", "kimi-k3-config.json"),
    "k3-vision": ORACLES / "k3-vision" / "config.json",
    "k3-mxfp4": ORACLES / "k3-mxfp4" / "config.json",
    "kimi-linear": ORACLES / "kimi-linear" / "config.json",
}
RAW = {name: json.loads(file.read_text()) for name, file in FILES.items()}
#: What transformers' own class for Kimi-Linear writes.
RAW["transformers"] = {
    **{key: value for key, value in RAW["kimi-linear"]["text_config"].items() if key != "linear_attn_config"},
    **{"model_type": "kimi_linear", "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    **{"linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "mlp_layer_types": ["dense"] * 2},
}
DEEP: list[Any] = []
for _ in range(20_000):
    DEEP = [DEEP]
VALUES = (
    *(None, "", "1e9", True, False, 0, -1, 1, 7, 10**9, -(10**9), 10**400, -(10**5000), 1e308, 0.5, float("nan")),
    *(
        float("-inf"),
        [],
        [[]],
        [None],
        [1, "2"],
        ["x"] * 1000,
        [10**4000] * 3,
        list(range(100_000)),
        {},
        {"a": {"b": 1}},
    ),
)
ABSENT = object()


def paths(raw: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key, as the keys that lead to it."""
    for key, value in raw.items():
        yield (*before, key)
        if isinstance(value, Mapping):
            yield from paths(value, (*before, key))


def put(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at `path`, or none."""
    raw = copy.deepcopy(raw)
    place: Any = raw
    for key in path[:-1]:
        place = place.get(key)
        if not isinstance(place, dict):
            return raw
    if value is ABSENT:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return raw


def read(raw: dict[str, Any]) -> ConfigError | KimiK3Config:
    """What becomes of it; anything but a ConfigError is a failure, and so is a message that nobody can read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return KimiK3Config.from_hf(raw)
        except ConfigError as error:
            refused = error
    assert str(refused).startswith("config.json: ")
    assert len(str(refused)) < 3000
    return refused


@pytest.mark.parametrize("name", RAW)
def test_every_key_with_every_value(name: str) -> None:
    assert isinstance(read(RAW[name]), KimiK3Config)
    start = time.process_time()
    for path in paths(RAW[name]):
        for value in (*VALUES, DEEP, ABSENT):
            outcome = read(put(RAW[name], path, value))
            if isinstance(outcome, KimiK3Config):
                assert hash(outcome)
    assert time.process_time() - start < 120  # 15 s where nothing else runs


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("situ"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_several_values_at_once(data: st.DataObject) -> None:
    raw = RAW[data.draw(st.sampled_from(sorted(RAW)))]
    places = sorted(paths(raw))
    for path in data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=4)):
        raw = put(raw, path, data.draw(JSON | st.just(ABSENT)))
    read(raw)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("text_config.hidden_size", 10**9, "hidden_size is 1000000000, must be at most 1048576"),
        ("text_config.num_hidden_layers", 10**9, "num_hidden_layers is 1000000000, must be at most 4096"),
        ("text_config.vocab_size", 10**400, "vocab_size is an integer of 1329 bits, must be at most 16777216"),
        ("text_config.hidden_size", [[1]], "hidden_size is [[1]], expected an integer"),
        ("text_config.rms_norm_eps", 1, "rms_norm_eps is 1, must be below 1"),
        ("text_config.routed_scaling_factor", 1e300, "routed_scaling_factor is 1e+300, must be at most 1e+06"),
        ("text_config.mla_use_nope", "no", "mla_use_nope is 'no', expected true or false"),
        ("text_config.linear_attn_config.kda_layers", [True], "kda_layers is [True], expected a list of integers"),
        ("vision_config", "none", "vision_config is 'none', expected an object or null"),
        ("vision_config.vt_num_hidden_layers", 10**9, "vt_num_hidden_layers is 1000000000, must be at most 4096"),
        ("vision_config.merge_kernel_size", [2, 10**9], "merge_kernel_size is [2, 1000000000], expected two sizes in"),
        ("dtype", ["bfloat16"], "dtype is ['bfloat16'], expected the name of a torch dtype, such as bfloat16"),
        ("eos_token_id", "</s>", "eos_token_id is '</s>', expected a token id in 0..127, a list of such, or null"),
        ("eos_token_id", [], "eos_token_id is [], expected a token id in 0..127, a list of such, or null"),
        ("eos_token_id", [[2]], "eos_token_id is [[2]], expected a token id in 0..127"),
        ("pad_token_id", 128, "pad_token_id is 128, expected a token id in 0..127 or null"),
    ],
)
def test_messages(path: str, value: Any, message: str) -> None:
    outcome = read(put(RAW["k3-vision"], tuple(path.split(".")), value))
    assert message in str(outcome)


@pytest.mark.parametrize("key", ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"])
def test_a_size_of_the_kda_layers_is_missing(key: str) -> None:
    assert f"missing {key}, which go with layer_types" in str(read(put(RAW["transformers"], (key,), ABSENT)))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("place", [(), ("text_config",)], ids=["top", "text"])
def test_the_dtype_by_either_name(place: tuple[str, ...], key: str) -> None:
    raw = RAW["published"]
    for path in (("dtype",), ("torch_dtype",), ("text_config", "dtype"), ("text_config", "torch_dtype")):
        raw = put(raw, path, ABSENT)
    outcome = read(put(raw, (*place, key), "float32"))
    assert isinstance(outcome, KimiK3Config)
    assert outcome.dtype == "float32"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "is nested too deep, expected a few levels"),
        ('{"a": ' * 200_000, "is nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        ("\udcff", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "holds a JSON list, expected an object"),
        ('{"a": 1, "a": 2}', "config.json: given twice: a; keep one of each"),
        (" " * (16 * 2**20 + 1), "has 16777217 bytes, expected at most 16777216"),
    ],
    ids=["deep list", "deep object", "digits", "bytes", "half", "list", "twice", "huge"],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ConfigError) as raised:
        KimiK3Config.from_pretrained(tmp_path)
    assert message in str(raised.value)
