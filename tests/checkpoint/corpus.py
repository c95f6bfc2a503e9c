"""Malformed checkpoints and configs, made from the oracles, each with what is to become of it.

`python -m tests.checkpoint.corpus OUT` writes them all to folders of OUT; `--table` prints the table of the docs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

ORACLES = Path(__file__).parents[1] / "oracle"

LAYER = "language_model.model.layers."
#: A KDA layer with experts and an MLA layer with experts, in each of the oracles that are used.
KDA, MLA = f"{LAYER}1.", f"{LAYER}3."
MOE = f"{KDA}block_sparse_moe."
EXPERT = f"{MOE}experts.3."
DESCRIPTION = "quant_model_description.json"


class Draft:
    """A checkpoint folder in memory, to be changed and written."""

    def __init__(self, oracle: str) -> None:
        folder = ORACLES / oracle
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, str] = {}
        for file in sorted(folder.glob("*model*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    self.tensors[name] = opened.get_tensor(name)
                    self.shards[name] = file.name
        self.index_name = next((file.name for file in folder.glob("*.index.json")), None)
        description = folder / DESCRIPTION
        self.description: dict[str, Any] | None = json.loads(description.read_text()) if description.is_file() else None
        #: Done to the folder once it is written.
        self.after: list[Callable[[Path], object]] = []

    @property
    def text(self) -> dict[str, Any]:
        return self.config["text_config"]

    @property
    def attention(self) -> dict[str, Any]:
        return self.text["linear_attn_config"]

    @property
    def files(self) -> list[str]:
        return sorted(set(self.shards.values()))

    def remove(self, prefix: str) -> None:
        for name in [name for name in self.tensors if name.startswith(prefix)]:
            del self.tensors[name], self.shards[name]
            if self.description:
                self.description.pop(name, None)

    def add(self, name: str, tensor: Tensor, like: str = "") -> None:
        """Described as the tensor `like` is, else as FLOAT, where there is a description."""
        self.tensors[name] = tensor
        self.shards[name] = self.files[0]
        if self.description is not None:
            self.description[name] = self.description.get(like, "FLOAT")

    def rename(self, old: str, new: str) -> None:
        """Keeps the place in the files."""
        self.tensors[new], self.shards[new] = self.tensors.pop(old), self.shards.pop(old)
        if self.description and old in self.description:
            self.description[new] = self.description.pop(old)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        if self.description is not None:
            (folder / DESCRIPTION).write_text(json.dumps(self.description))
        for file in self.files:
            members = {name: tensor.contiguous() for name, tensor in self.tensors.items() if self.shards[name] == file}
            save_file(members, folder / file, {"format": "pt"})
        if self.index_name:
            total = sum(tensor.nbytes for tensor in self.tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": self.shards}
            (folder / self.index_name).write_text(json.dumps(index))
        for change in self.after:
            change(folder)


@dataclass(frozen=True)
class Base:
    """A sound checkpoint that faults are put into.

    Args:
        oracle: Its folder.
        codes: What follows the name of an expert's matrix, where a plain one has ".weight".
    """

    oracle: str
    codes: str = ".weight"

    @cached_property
    def sound(self) -> Draft:
        """Not to be changed."""
        return Draft(self.oracle)

    def stored(self, name: str) -> str:
        """What a plain checkpoint calls `name`; of an expert, the codes."""
        return f"{name.removesuffix('.weight')}{self.codes}" if name.startswith(f"{MOE}experts.") else name


PLAIN, MXFP4, W4A8 = BASES = (Base("k3"), Base("k3-mxfp4", ".weight_packed"), Base("k3-w4a8"))

Change = Callable[[Draft], object]

#: What becomes of a case: it is refused; it loads with a warning; it loads, and only checksums show it.
Outcome = Literal["refused", "warned", "checksum"]


@dataclass(frozen=True)
class Case:
    """One malformed checkpoint.

    Args:
        what: What is wrong, for people.
        oracle: What it is made from.
        change: How.
        words: What the message says, among other things: the tensor, file or field, and the fault.
        engines: What SGLang 0.5.23 and vLLM 0.32.0 made of the same: C a clear error, U an unclear one, S loaded in
            silence (= with the same tokens, ≠ with others). Empty where it was not tried.
    """

    what: str
    oracle: str
    change: Change
    words: tuple[str, ...]
    outcome: Outcome = "refused"
    engines: str = ""

    @property
    def name(self) -> str:
        return f"{self.oracle}: {self.what}"


# --- changes


def without(prefix: str) -> Change:
    return lambda draft: draft.remove(prefix)


def renamed(old: str, new: str) -> Change:
    return lambda draft: draft.rename(old, new)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda draft: draft.tensors.__setitem__(name, change(draft.tensors[name]))


def added(name: str, tensor: Tensor) -> Change:
    return lambda draft: draft.add(name, tensor)


def with_value(value: float, name: str) -> Change:
    """One element of a tensor."""

    def change(draft: Draft) -> None:
        draft.tensors[name].view(-1)[-1] = value

    return change


def text(**values: Any) -> Change:
    return lambda draft: draft.text.update(values)


def without_key(key: str) -> Change:
    return lambda draft: draft.text.pop(key)


def attention(**values: Any) -> Change:
    return lambda draft: draft.attention.update(values)


def after(change: Callable[[Path], object]) -> Change:
    return lambda draft: draft.after.append(change)


def described(name: str, kind: Any) -> Change:
    return lambda draft: draft.description.__setitem__(name, kind)


def swapped(a: str, b: str) -> Change:
    def change(draft: Draft) -> None:
        draft.tensors[a], draft.tensors[b] = draft.tensors[b], draft.tensors[a]

    return change


def exchanged(a: str, b: str) -> Change:
    """All tensors whose names begin with one or the other."""

    def change(draft: Draft) -> None:
        for name in [name for name in draft.tensors if name.startswith(a)]:
            swapped(name, b + name.removeprefix(a))(draft)

    return change


def with_another_expert(draft: Draft) -> None:
    for name in [name for name in draft.tensors if name.startswith(EXPERT)]:
        draft.add(name.replace(EXPERT, f"{MOE}experts.16."), draft.tensors[name].clone(), like=name)


def double_rows(x: Tensor) -> Tensor:
    return torch.cat([x, x])


def half_rows(x: Tensor) -> Tensor:
    return x[: len(x) // 2]


def transposed(x: Tensor) -> Tensor:
    return x.t()


def as_int8(x: Tensor) -> Tensor:
    return (x * 10).to(torch.int8)


def no_rows(x: Tensor) -> Tensor:
    return x[:0]


# --- cases


def cases() -> list[Case]:
    kinds = (missing, misnamed, misshapen, contents, files, configs, unseen)
    found = [case for kind in kinds for base in BASES for case in kind(base)]
    found += [*plain(), *vision(), *mxfp4(), *w4a8()]
    assert len({case.name for case in found}) == len(found)
    return found


def short(name: str) -> str:
    return name.removeprefix("language_model.").removeprefix("model.layers.")


def missing(base: Base) -> Iterator[Case]:
    for name, engines in {
        f"{KDA}input_layernorm.weight": "S≠ / C",
        "language_model.model.norm.weight": "S= / C",
        f"{KDA}self_attn.q_proj.weight": "S≠ / S≠",
        f"{MLA}self_attn.q_b_proj.weight": "S≠ / SNaN",
        f"{EXPERT}w2.weight": "S≠ / SNaN",
        "language_model.lm_head.weight": "S≠ / SNaN",
        f"{KDA}self_attn.A_log": "S≠ / C",
        f"{KDA}self_attn.dt_bias": "S≠ / C",
        f"{KDA}self_attn.k_conv1d.weight": "S≠ / S≠",
        f"{MOE}gate.e_score_correction_bias": "S≠ / S≠",
        f"{MOE}routed_expert_norm.weight": "S≠ / C",
        f"{KDA}self_attention_res_proj.weight": "S≠ / S≠",
        f"{MOE}gate.weight": "S≠ / S≠",
        "language_model.model.embed_tokens.weight": "S≠ / S≠",
        f"{KDA}self_attn.o_norm.weight": "S≠ / C",
    }.items():
        stored = base.stored(name)
        yield Case(f"missing {short(name)}", base.oracle, without(stored), ("missing tensor", stored), engines=engines)
    yield Case(
        "an expert missing entirely",
        base.oracle,
        without(EXPERT),
        (f"{EXPERT}w1{base.codes}", f"{EXPERT}w2{base.codes}"),
        engines="S≠ / SNaN",
    )
    yield Case(
        "a layer missing entirely",
        base.oracle,
        without(f"{LAYER}2."),
        ("missing tensor", f"{LAYER}2."),
        engines="SNaN / C",
    )
    yield Case(
        "two of three convolutions missing",
        base.oracle,
        both(without(f"{KDA}self_attn.q_conv1d"), without(f"{KDA}self_attn.v_conv1d")),
        (f"{KDA}self_attn.q_conv1d.weight", f"{KDA}self_attn.v_conv1d.weight"),
    )


def misnamed(base: Base) -> Iterator[Case]:
    layers = base.sound.text["num_hidden_layers"]
    extra = f"{LAYER}{layers}.input_layernorm.weight"
    for old, new, engines in (
        (f"{KDA}self_attn.o_proj.weight", f"{KDA}self_attn.o_proj.weigth", "S≠ / C"),
        (f"{KDA}self_attn.A_log", f"{KDA}self_attn.Alog", "S≠ / C"),
        (f"{EXPERT}w2.weight", f"{EXPERT}w2.weigth", "S≠ / C"),
        (f"{EXPERT}w2.weight", f"{EXPERT}down_proj.weight", "S≠ / C"),
    ):
        yield Case(
            f"misnamed {short(new)}",
            base.oracle,
            renamed(base.stored(old), base.stored(new)),
            ("unknown tensor", base.stored(new), "missing tensor", base.stored(old)),
            engines=engines,
        )
    yield Case(
        "an unknown tensor more",
        base.oracle,
        added(f"{KDA}self_attn.extra", torch.ones(3)),
        ("unknown tensor", f"{KDA}self_attn.extra"),
        engines="S= / C",
    )
    yield Case(
        "a tensor under two of its names",
        base.oracle,
        lambda draft: draft.add(f"{KDA}mlp.gate.weight", draft.tensors[f"{MOE}gate.weight"] + 1),
        ("tensor given twice", f"{KDA}mlp.gate.weight"),
    )
    yield Case(
        "an expert more than num_experts",
        base.oracle,
        with_another_expert,
        ("unknown tensor", f"{MOE}experts.16.w1{base.codes}", "num_experts = 16"),
    )
    yield Case(
        "a layer more than num_hidden_layers",
        base.oracle,
        added(extra, torch.ones(64)),
        ("unknown tensor", extra, f"num_hidden_layers = {layers}"),
        engines="S= / C",
    )
    yield Case(
        "an MLA tensor in a KDA layer",
        base.oracle,
        added(f"{KDA}self_attn.q_b_proj.weight", torch.zeros(96, 24)),
        ("unknown tensor", f"{KDA}self_attn.q_b_proj.weight", "kda attention"),
    )


def misshapen(base: Base) -> Iterator[Case]:
    for what, name, change, engines in (
        ("w1 with half the rows", f"{EXPERT}w1{base.codes}", half_rows, "S≠ / S≠"),
        ("w1 with twice the rows", f"{EXPERT}w1{base.codes}", double_rows, "U / U"),
        ("w2 with half the rows", f"{EXPERT}w2{base.codes}", half_rows, "U / S≠"),
        ("w2 with one row", f"{EXPERT}w2{base.codes}", lambda x: x[:1], "S≠ / S≠"),
        ("kv_b_proj with too few rows", f"{MLA}self_attn.kv_b_proj.weight", lambda x: x[:-8], "U / U"),
        ("kv_b_proj with twice the rows", f"{MLA}self_attn.kv_b_proj.weight", double_rows, "S= / S="),
        ("kv_a_proj with one row", f"{MLA}self_attn.kv_a_proj_with_mqa.weight", lambda x: x[:1], "S≠ / U"),
        ("q_a_proj with half the rows", f"{MLA}self_attn.q_a_proj.weight", half_rows, "S≠ / U"),
        ("down projection transposed", f"{LAYER}0.mlp.down_proj.weight", transposed, "U / U"),
        ("A_log as [1, h, 1, 1]", f"{KDA}self_attn.A_log", lambda x: x[:4].view(1, 4, 1, 1), "U / U"),
        ("A_log too short", f"{KDA}self_attn.A_log", lambda x: x[:3], "U / U"),
        ("a norm without elements", f"{KDA}input_layernorm.weight", no_rows, "U / U"),
        ("w2 without elements", f"{EXPERT}w2{base.codes}", no_rows, "U / S≠"),
        ("a convolution without its middle dimension", f"{KDA}self_attn.q_conv1d.weight", lambda x: x[:, 0], ""),
        ("a scalar for a norm", f"{KDA}self_attn.o_norm.weight", lambda x: x[0], ""),
    ):
        yield Case(what, base.oracle, replaced(name, change), (name,), engines=engines)
    yield Case(
        "A_log as [1, 1, h, 1]",
        base.oracle,
        replaced(f"{KDA}self_attn.A_log", lambda x: x[:4].view(1, 1, 4, 1)),
        ("former shape", f"{KDA}self_attn.A_log"),
        "warned",
        "S= / S=",
    )


def contents(base: Base) -> Iterator[Case]:
    for what, name, value, engines in (
        ("NaN in q_proj", f"{KDA}self_attn.q_proj.weight", torch.nan, "SNaN / SNaN"),
        ("NaN in e_score_correction_bias", f"{MOE}gate.e_score_correction_bias", torch.nan, "S≠ / S≠"),
        ("infinity in lm_head", "language_model.lm_head.weight", torch.inf, ""),
        ("minus infinity in a norm", f"{KDA}mlp_res_norm.weight", -torch.inf, ""),
    ):
        yield Case(what, base.oracle, with_value(value, name), ("not finite", name), engines=engines)
    yield Case(
        "A_log with values after the heads",
        base.oracle,
        with_value(1.0, f"{KDA}self_attn.A_log"),
        ("wrong content", f"{KDA}self_attn.A_log", "expected padding"),
        engines="S= / S=",
    )
    o_proj = f"{KDA}self_attn.o_proj.weight"
    yield Case(
        "o_proj stored as int8",
        base.oracle,
        replaced(o_proj, as_int8),
        ("wrong dtype", o_proj, "int8"),
        engines="S≠ / S≠",
    )
    yield Case(
        "a norm stored as float64",
        base.oracle,
        replaced("language_model.model.norm.weight", torch.Tensor.double),
        ("wrong dtype", "language_model.model.norm.weight", "float64"),
    )
    yield Case(
        "embeddings stored as float8",
        base.oracle,
        replaced("language_model.model.embed_tokens.weight", lambda x: x.to(torch.float8_e4m3fn)),
        ("wrong dtype", "language_model.model.embed_tokens.weight", "float8_e4m3fn"),
    )
    yield Case(
        "convolutions stored as bfloat16",
        base.oracle,
        replaced(f"{KDA}self_attn.q_conv1d.weight", torch.Tensor.bfloat16),
        ("less precise than published", f"{KDA}self_attn.q_conv1d.weight"),
        "warned",
        "S= / S=",
    )


def files(base: Base) -> Iterator[Case]:
    (first, second), index = base.sound.files, base.sound.index_name
    left_over = second.replace("00002-of", "00003-of")
    o_proj = f"{KDA}self_attn.o_proj.weight"

    def duplicate(folder: Path) -> None:
        with safe_open(folder / second, "pt") as opened:
            held = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        save_file(held | {o_proj: torch.ones(64, 64)}, folder / second)

    def change_index(change: Callable[[dict[str, Any]], object]) -> Change:
        def edit(folder: Path) -> None:
            fields = json.loads((folder / index).read_text())
            change(fields)
            (folder / index).write_text(json.dumps(fields))

        return after(edit)

    def no_index_and_no(shard: str) -> Change:
        return after(lambda folder: [(folder / name).unlink() for name in (index, shard)])

    def forget_shard(fields: dict[str, Any]) -> None:
        fields["weight_map"] = {name: file for name, file in fields["weight_map"].items() if file != second}

    yield Case(
        "the same tensor in two shards", base.oracle, after(duplicate), ("duplicate tensor", o_proj), engines="S≠ / S≠"
    )
    yield Case(
        "a truncated shard",
        base.oracle,
        after(lambda folder: os.truncate(folder / second, (folder / second).stat().st_size - 100)),
        ("truncated", second),
        engines="U / U",
    )
    yield Case(
        "a shard cut within its header",
        base.oracle,
        after(lambda folder: os.truncate(folder / second, 1000)),
        ("truncated", second),
    )
    yield Case(
        "a shard of zero bytes",
        base.oracle,
        after(lambda folder: os.truncate(folder / second, 0)),
        ("truncated", second),
    )
    yield Case(
        "a shard that is a Git LFS pointer",
        base.oracle,
        after(
            lambda folder: (folder / second).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        ),
        (second,),
    )
    yield Case(
        "a shard in the index, absent on disk",
        base.oracle,
        after(lambda folder: (folder / second).unlink()),
        ("missing shard", second),
        engines="C / C",
    )
    yield Case(
        "no index and a shard absent",
        base.oracle,
        no_index_and_no(second),
        ("missing shard", second),
        engines="SNaN / C",
    )
    yield Case(
        "the index lacks one tensor of a shard",
        base.oracle,
        change_index(lambda fields: fields["weight_map"].pop(o_proj)),
        ("tensor not in the index", o_proj),
        engines="S= / S=",
    )
    yield Case(
        "the index lacks a whole shard",
        base.oracle,
        change_index(forget_shard),
        ("missing tensor",),
        engines="SNaN / C",
    )
    yield Case(
        "a tensor in the index, not in its shard",
        base.oracle,
        change_index(lambda fields: fields["weight_map"].update({"language_model.ghost": first})),
        ("tensor not in its shard", "language_model.ghost"),
        engines="S≠ / S≠",
    )
    yield Case(
        "the index names the wrong shard",
        base.oracle,
        change_index(lambda fields: fields["weight_map"].update({o_proj: second})),
        ("tensor in another shard", o_proj),
    )
    yield Case(
        "an index that is no JSON",
        base.oracle,
        after(lambda folder: (folder / index).write_text("{")),
        ("broken index", index),
    )
    yield Case(
        "two indexes",
        base.oracle,
        after(lambda folder: shutil.copy(folder / index, folder / f"other.{index}")),
        ("ambiguous index", index),
    )
    yield Case(
        "bytes after the last tensor",
        base.oracle,
        after(lambda folder: (folder / second).write_bytes((folder / second).read_bytes() + b"more")),
        ("unclaimed bytes", second),
    )
    yield Case(
        "total_size of the index is wrong",
        base.oracle,
        change_index(lambda fields: fields["metadata"].update(total_size=1)),
        ("wrong total", index),
        "warned",
    )
    yield Case(
        "a shard left over from another version",
        base.oracle,
        after(lambda folder: shutil.copy(folder / second, folder / left_over)),
        ("not part of the checkpoint", left_over),
        "warned",
    )
    yield Case(
        "no weights at all",
        base.oracle,
        after(lambda folder: [f.unlink() for f in folder.glob("*.s*")]),
        ("no safetensors",),
    )


def configs(base: Base) -> Iterator[Case]:
    kda, mla = base.sound.attention["kda_layers"], base.sound.attention["full_attn_layers"]
    for what, change, words, engines in (
        (
            "a layer in neither list",
            attention(kda_layers=kda[:-1]),
            ("linear_attn_config", f"in neither list: [{kda[-1]}]"),
            "U / C",
        ),
        (
            "a layer in both lists",
            attention(kda_layers=[*kda, 4]),
            ("linear_attn_config", "listed twice: [4]"),
            "S≠ / C",
        ),
        (
            "0-based layer lists",
            attention(kda_layers=[n - 1 for n in kda], full_attn_layers=[n - 1 for n in mla]),
            ("linear_attn_config", "1-based"),
            "U / C",
        ),
        (
            "more experts per token than experts",
            text(num_experts_per_token=17),
            ("num_experts_per_token is 17",),
            "U / U",
        ),
        ("more experts than the file has", text(num_experts=32), (f"{MOE}gate.weight",), "U / U"),
        ("fewer experts than the file has", text(num_experts=8), ("unknown tensor", "num_experts = 8"), "U / C"),
        ("no activation_situ_beta", without_key("activation_situ_beta"), ("activation_situ_beta",), "S≠ / -"),
        (
            "no activation_situ_linear_beta",
            without_key("activation_situ_linear_beta"),
            ("activation_situ_linear_beta",),
            "S≠ / -",
        ),
        ("no attn_res_block_size", without_key("attn_res_block_size"), ("attn_res_block_size",), "S≠ / C"),
        ("no mla_use_output_gate", without_key("mla_use_output_gate"), ("mla_use_output_gate",), "S= / C"),
        ("no latent_moe_use_norm", without_key("latent_moe_use_norm"), ("latent_moe_use_norm",), ""),
        ("no intermediate_size", without_key("intermediate_size"), ("intermediate_size",), ""),
        ("no rms_norm_eps", without_key("rms_norm_eps"), ("rms_norm_eps",), ""),
        (
            "attn_res_block_size is null",
            text(attn_res_block_size=None),
            ("unknown tensor", "self_attention_res_norm"),
            "",
        ),
        (
            "mla_use_output_gate is false",
            text(mla_use_output_gate=False),
            ("unknown tensor", f"{MLA}self_attn.g_proj"),
            "",
        ),
        ("routed_expert_hidden_size is null", text(routed_expert_hidden_size=None), ("routed_expert_down_proj",), ""),
        ("hidden_size is a text", text(hidden_size="64"), ("hidden_size", "expected an integer"), ""),
        ("hidden_size is half", text(hidden_size=32), ("wrong shape", "expected [32]"), ""),
        ("rms_norm_eps is negative", text(rms_norm_eps=-1e-5), ("rms_norm_eps", "must be positive"), ""),
        ("one shared expert, not two", text(num_shared_experts=1), ("wrong shape", "shared_experts"), ""),
        ("two dense layers, not one", text(first_k_dense_replace=2), ("unknown tensor", MOE), ""),
        ("an unknown activation", text(hidden_act="relu"), ("hidden_act is 'relu'",), ""),
        ("rotary embedding wanted", text(mla_use_nope=False), ("mla_use_nope",), ""),
        (
            "an unknown model_type",
            lambda draft: draft.config.update(model_type="kimi_k4"),
            ("model_type is 'kimi_k4'",),
            "",
        ),
        ("no text_config", lambda draft: draft.config.pop("text_config"), ("text_config",), ""),
        ("an unknown dtype", lambda draft: draft.config.update(dtype="float8"), ("dtype is 'float8'",), ""),
    ):
        yield Case(f"config: {what}", base.oracle, change, words, engines=engines)
    yield Case(
        "config: no gate_lower_bound",
        base.oracle,
        lambda draft: draft.attention.pop("gate_lower_bound"),
        ("linear_attn_config.gate_lower_bound",),
        engines="S≠ / S≠",
    )
    yield Case(
        "config: no JSON",
        base.oracle,
        after(lambda folder: (folder / "config.json").write_text("{,")),
        ("config.json: not valid JSON",),
    )
    yield Case(
        "config: no file",
        base.oracle,
        after(lambda folder: (folder / "config.json").unlink()),
        ("config.json: missing",),
    )

    def twice(folder: Path) -> None:
        raw = (folder / "config.json").read_text()
        (folder / "config.json").write_text(raw.replace('"hidden_size"', '"hidden_size": 128, "hidden_size"', 1))

    yield Case("config: a key twice", base.oracle, after(twice), ("given twice: hidden_size",))
    yield Case(
        "config: an unknown key",
        base.oracle,
        text(new_kind_of_norm=True),
        ("keys this version does not know: new_kind_of_norm",),
        "warned",
    )


def plain() -> Iterator[Case]:
    """What only plain experts can have."""
    w2 = f"{EXPERT}w2.weight"
    yield Case("NaN in w2 of an expert", "k3", with_value(torch.nan, w2), ("not finite", w2), engines="SNaN / SNaN")
    yield Case(
        "w2 of an expert stored as int8", "k3", replaced(w2, as_int8), ("wrong dtype", w2, "int8"), engines="S≠ / S≠"
    )
    yield Case(
        "quantization_config, but plain experts",
        "k3",
        text(quantization_config=published_quantization()),
        ("weight_packed",),
    )


def vision() -> Iterator[Case]:
    yield Case(
        "vision: a block's weight missing",
        "k3-vision",
        without("vision_tower.encoder.blocks.1.wo"),
        ("missing tensor", "vision_tower.encoder.blocks.1.wo.weight"),
    )
    yield Case(
        "vision weights, but no vision_config",
        "k3-vision",
        lambda draft: draft.config.pop("vision_config"),
        ("unknown tensor", "vision_tower.", "no vision_config"),
    )


def mxfp4() -> Iterator[Case]:
    packed, scale = f"{EXPERT}w2.weight_packed", f"{EXPERT}w2.weight_scale"

    def group(**values: Any) -> Change:
        def change(draft: Draft) -> None:
            draft.text["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)

        return change

    def quantization(**values: Any) -> Change:
        return lambda draft: draft.text["quantization_config"].update(values)

    def both_given(draft: Draft) -> None:
        draft.add(f"{EXPERT}w2.weight", torch.zeros(32, 32))

    for what, change, words in (
        ("missing weight_scale", without(scale), ("missing tensor", scale)),
        ("scale is NaN (255)", with_value(255, scale), ("wrong content", "w2.weight_", "255")),
        (
            "codes stored as int8",
            replaced(packed, lambda x: x.view(torch.int8)),
            ("wrong dtype", packed, "expected uint8"),
        ),
        ("scale stored as float32", replaced(scale, torch.Tensor.float), ("wrong dtype", scale)),
        ("codes of half the inputs", replaced(packed, lambda x: x[:, :8]), ("wrong shape", packed)),
        ("codes transposed", replaced(packed, transposed), ("wrong shape", packed)),
        ("a scale for each 16 inputs", replaced(scale, lambda x: x.repeat(1, 2)), ("wrong shape", scale)),
        ("scale without its second dimension", replaced(scale, lambda x: x[:, 0]), ("wrong shape", scale)),
        ("codes without elements", replaced(packed, no_rows), ("wrong shape", packed)),
        ("codes and scale misnamed", renamed(packed, f"{EXPERT}w2.packed"), ("unknown tensor", f"{EXPERT}w2.packed")),
        ("an expert both packed and plain", both_given, ("unknown tensor", f"{EXPERT}w2.weight", "MXFP4")),
        (
            "a plain tensor packed",
            renamed(f"{KDA}self_attn.o_proj.weight", f"{KDA}self_attn.o_proj.weight_packed"),
            ("o_proj",),
        ),
        ("no quantization_config", without_key("quantization_config"), ("quantization_config", "weight_packed")),
        (
            "another format",
            quantization(format="nvfp4-pack-quantized"),
            ("quantization_config", "nvfp4-pack-quantized"),
        ),
        ("another quant_method", quantization(quant_method="fp8"), ("quantization_config", "fp8")),
        ("a group of 64", group(group_size=64), ("quantization_config", "group_size")),
        ("8 bits", group(num_bits=8), ("quantization_config", "num_bits")),
        ("a list of groups", quantization(config_groups=[4]), ("quantization_config.config_groups", "[4]")),
        (
            "a group without weights",
            quantization(config_groups={"group_0": {}}),
            ("quantization_config group_0 has {'num_bits': None",),
        ),
    ):
        yield Case(what, "k3-mxfp4", change, words)
    for what, name in (("one code changed", packed), ("one scale changed", scale)):
        yield Case(what, "k3-mxfp4", replaced(name, flip_last), (name,), "checksum")


def published_quantization() -> dict[str, Any]:
    return json.loads((ORACLES / "k3-mxfp4" / "config.json").read_text())["text_config"]["quantization_config"]


def w4a8() -> Iterator[Case]:
    weight, scale, offset = (f"{EXPERT}w2.{part}" for part in ("weight", "weight_scale", "weight_offset"))
    bias, linear = f"{EXPERT}w2.scale_bias", f"{MOE}shared_experts.down_proj.weight"
    norm = f"{KDA}input_layernorm.weight"

    def high_nibble_first(x: Tensor) -> Tensor:
        return (x << 4) | ((x >> 4) & 0xF)

    def all_kinds(kind: str) -> Change:
        def change(draft: Draft) -> None:
            for part in ("weight", "weight_scale", "weight_offset", "scale_bias"):
                if f"{EXPERT}w2.{part}" in draft.description:
                    draft.description[f"{EXPERT}w2.{part}"] = kind

        return change

    def no_description(draft: Draft) -> None:
        draft.description = None

    for what, change, words in (
        ("no description", no_description, ("missing quantization", DESCRIPTION)),
        (
            "a description that is no JSON",
            after(lambda f: (f / DESCRIPTION).write_text("{")),
            (DESCRIPTION, "not valid JSON"),
        ),
        ("an empty description", lambda draft: draft.description.clear(), (DESCRIPTION, "describes no tensor")),
        (
            "described, but not there",
            described(f"{KDA}ghost.weight", "FLOAT"),
            ("described but missing", f"{KDA}ghost.weight"),
        ),
        (
            "int8 tensors not described",
            lambda d: [d.description.pop(n) for n in (weight, scale, offset, bias)],
            (weight,),
        ),
        ("a static W8A8 layer", described(linear, "W8A8"), ("unsupported quantization", linear, "W8A8")),
        ("codes said to be FLOAT", all_kinds("FLOAT"), ("wrong dtype", weight)),
        ("codes said to be W8A8_DYNAMIC", all_kinds("W8A8_DYNAMIC"), ("wrong shape", weight)),
        ("a norm said to be W8A8_DYNAMIC", described(norm, "W8A8_DYNAMIC"), (norm, "W8A8_DYNAMIC")),
        ("codes and scale said to be different", described(scale, "FLOAT"), ("contradictory description", "w2.weight")),
        ("scales by group", described("group_size", 256), ("unsupported quantization", "group_size is 256")),
        (
            "MXFP4 by config.json as well",
            text(quantization_config=published_quantization()),
            ("two quantizations", "quantization_config", DESCRIPTION),
        ),
        ("missing weight_scale", without(scale), ("missing tensor", scale)),
        ("missing scale_bias", without(bias), ("missing tensor", bias)),
        ("missing weight_offset", without(offset), ("missing tensor", offset)),
        ("high nibble first", replaced(weight, high_nibble_first), ("wrong content", "w2.", "scale_bias")),
        ("a scale doubled", replaced(scale, lambda x: x * 2), ("wrong content", "w2.", "scale_bias")),
        ("scale_bias without the factor 8", replaced(bias, lambda x: x / 8), ("wrong content", "w2.", "scale_bias")),
        (
            "codes of another expert",
            swapped(weight, f"{MOE}experts.4.w2.weight"),
            ("wrong content", "w2.", "scale_bias"),
        ),
        ("an offset", with_value(1.0, offset), ("wrong content", "w2.", "weight_offset")),
        ("a negative scale", with_value(-1.0, scale), ("wrong content", "w2.", "weight_scale")),
        ("a scale that is NaN", with_value(torch.nan, scale), ("not finite", scale)),
        ("scale as [N], not [N, 1]", replaced(scale, lambda x: x[:, 0]), ("wrong shape", scale)),
        ("15 segments of scale_bias", replaced(bias, lambda x: x[:, :15]), ("wrong shape", bias)),
        ("codes stored as uint8", replaced(weight, lambda x: x.view(torch.uint8)), ("wrong dtype", weight)),
        ("codes not packed", replaced(weight, lambda x: x.repeat(2, 1)), ("wrong shape", weight)),
        ("codes packed along the inputs", replaced(weight, transposed), ("wrong shape", weight)),
        ("a W8A8 weight as float32", replaced(linear, torch.Tensor.float), ("wrong dtype", linear)),
        ("a W8A8 scale missing", without(f"{linear}_scale"), ("missing tensor", f"{linear}_scale")),
    ):
        yield Case(what, "k3-w4a8", change, words)
    yield Case(
        "a float tensor not described",
        "k3-w4a8",
        lambda draft: draft.description.pop(norm),
        ("not described", norm),
        "warned",
    )
    yield Case(
        "scales stored as bfloat16",
        "k3-w4a8",
        replaced(f"{linear}_scale", torch.Tensor.bfloat16),
        ("less precise than published", f"{linear}_scale"),
        "warned",
    )
    yield Case(
        "a rotation for images, but no vision tower",
        "k3-w4a8",
        added("mm_projector.rot_proj.weight", torch.eye(64)),
        ("left out", "mm_projector.rot_proj.weight"),
        "warned",
    )


def unseen(base: Base) -> Iterator[Case]:
    """Right in everything that can be looked at."""
    o_proj, bias = f"{KDA}self_attn.o_proj.weight", f"{MOE}gate.e_score_correction_bias"
    for what, change, words, engines in (
        ("a square matrix transposed", replaced(o_proj, transposed), (o_proj,), "S≠ / S≠"),
        ("one value changed", with_value(0.5, o_proj), (o_proj,), ""),
        (
            "one bit of a norm changed",
            replaced(f"{KDA}input_layernorm.weight", next_float),
            (f"{KDA}input_layernorm.weight",),
            "",
        ),
        ("the router's bias shifted", replaced(bias, lambda x: x.roll(1)), (bias,), ""),
        (
            "two experts exchanged",
            exchanged(f"{MOE}experts.3.", f"{MOE}experts.5."),
            (f"{MOE}experts.3.w1{base.codes}", f"{MOE}experts.5.w2{base.codes}"),
            "",
        ),
        (
            "gate and up exchanged",
            exchanged(f"{EXPERT}w1.", f"{EXPERT}w3."),
            (f"{EXPERT}w1{base.codes}", f"{EXPERT}w3{base.codes}"),
            "",
        ),
        ("config: another rms_norm_eps", text(rms_norm_eps=1e-6), ("text_config.rms_norm_eps", "1e-06"), ""),
        (
            "config: another activation_situ_beta",
            text(activation_situ_beta=1.0),
            ("text_config.activation_situ_beta",),
            "",
        ),
        ("config: another gate_lower_bound", attention(gate_lower_bound=-4.0), ("gate_lower_bound",), ""),
        ("config: another routed_scaling_factor", text(routed_scaling_factor=2.0), ("routed_scaling_factor",), ""),
    ):
        yield Case(what, base.oracle, change, words, "checksum", engines)


def next_float(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = torch.nextafter(x[0], torch.tensor(torch.inf))
    return x


def flip_last(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[-1] ^= 1
    return x


def both(first: Change, second: Change) -> Change:
    return lambda draft: (first(draft), second(draft))


# --- the table of the documentation


def table() -> str:
    """A line for each fault, with all the checkpoints it was put into."""
    words = {"refused": "refused", "warned": "loads, with a warning", "checksum": "only checksums show it"}
    oracles: dict[tuple[str, str, str], list[str]] = {}
    for case in cases():
        oracles.setdefault((case.what, words[case.outcome], case.engines), []).append(case.oracle)
    lines = ["| what is wrong | checkpoint | outcome | SGLang / vLLM |", "|---|---|---|---|"]
    lines += [f"| {what} | {', '.join(found)} | {end} | {engines} |" for (what, end, engines), found in oracles.items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if arguments == ["--table"]:
        sys.stdout.write(table())
        return
    (out,) = arguments
    for number, found in enumerate(cases(), start=1):
        draft = Draft(found.oracle)
        found.change(draft)
        draft.write(Path(out) / f"{number:03}")
        (Path(out) / f"{number:03}" / "case.txt").write_text(
            f"{found.name}: {found.outcome}, naming {', '.join(found.words)}\n"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
