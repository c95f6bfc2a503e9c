"""`info`: what a checkpoint folder is, in words and numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kimi_k3_npu.config import KimiK3Config, TextConfig


@dataclass(frozen=True)
class Stored:
    """The weights in a folder. `dtypes` has the bytes of each stored dtype."""

    format: str
    tensors: int
    shards: int
    bytes: int
    dtypes: dict[str, int]


def info(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint folder, or one with just a config.json.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Describe a checkpoint folder: the network, its parameters block by block, and how they are stored."""
    from kimi_k3_npu.config import KimiK3Config

    config = KimiK3Config.from_pretrained(folder)
    stored = _stored(folder, config)
    counts = parameter_counts(config)
    total, active = sum(counts.values()), active_parameters(counts, config.text)
    if as_json:
        result = {
            "config": asdict(config),
            "parameters": {**counts, "total": total, "active_per_token": active},
            "weights": stored and asdict(stored),
        }
        typer.echo(json.dumps(result, indent=2, ensure_ascii=False))
        return
    sections: list[list[tuple[str, str]]] = [
        [("model", f"{config.model_type}, {_billions(total)} parameters, {_billions(active)} active per token")],
        list(_in_words(config)),
        [(block, f"{count:>17,}  {100 * count / total:6.2f} %") for block, count in counts.items() if count],
        [
            ("total", f"{total:>17,}"),
            ("active", f"{active:>17,}  per token: a token's share of the experts, no lookup or vision"),
        ],
        [("weights", _stored_in_words(stored))],
    ]
    width = max(len(label) for section in sections for label, _ in section)
    typer.echo("\n\n".join("\n".join(f"{label:<{width}}  {text}" for label, text in section) for section in sections))


def parameter_counts(config: KimiK3Config) -> dict[str, int]:
    """Parameters of each block of the plan, counted on the real modules without memory for them."""
    import torch

    from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
    from kimi_k3_npu.plan.weights import BLOCKS, block_of

    with torch.device("meta"):
        model = KimiK3ForCausalLM(config)
    counts: dict[str, int] = dict.fromkeys(BLOCKS, 0)
    for name, parameter in model.named_parameters():
        counts[block_of(name, config.text)] += parameter.numel()
    return counts


def active_parameters(counts: dict[str, int], text: TextConfig) -> int:
    """Parameters that one token of text is multiplied with: of the experts its own, of the embedding none."""
    idle = {"vision", "routed experts"} | (set() if text.tie_word_embeddings else {"embedding"})
    active = sum(count for block, count in counts.items() if block not in idle)
    return active + (
        counts["routed experts"] * text.num_experts_per_token // text.num_experts if text.num_experts else 0
    )


def _stored(folder: Path, config: KimiK3Config) -> Stored | None:
    """What the folder's shards hold; None if there are none."""
    from kimi_k3_npu.checkpoint.folder import has_weights
    from kimi_k3_npu.checkpoint.reader import Checkpoint
    from kimi_k3_npu.formats import FORMATS

    if not has_weights(folder):
        return None
    entries = Checkpoint.open(folder).entries.values()
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[str(entry.dtype).removeprefix("torch.")] += entry.nbytes
    if (folder / "quant_model_description.json").is_file():
        layout = "ModelSlim"
    elif config.quantization:
        layout = f"{FORMATS[config.quantization].title} experts"
    else:
        layout = "plain"
    files = {entry.file for entry in entries}
    return Stored(layout, len(entries), len(files), sum(dtypes.values()), dict(dtypes.most_common()))


def _stored_in_words(stored: Stored | None) -> str:
    if stored is None:
        return "none in this folder, only config.json"
    dtypes = ", ".join(f"{dtype} {_bytes(count)}" for dtype, count in stored.dtypes.items())
    shards = f"{stored.shards} shard{'s' * (stored.shards != 1)}"
    return f"{stored.format}: {stored.tensors:,} tensors in {shards}, {_bytes(stored.bytes)} ({dtypes})"


def _in_words(config: KimiK3Config) -> Iterator[tuple[str, str]]:
    text = config.text
    yield "layers", f"{text.num_hidden_layers} of width {text.hidden_size}, vocabulary {text.vocab_size:,}"
    if text.attn_res_block_size is None:
        yield "residual", "plain additions"
    else:
        blocks = -(-text.num_hidden_layers // text.attn_res_block_size)
        yield "residual", f"attention residuals over {blocks} blocks of {text.attn_res_block_size} layers"
    if text.kda_layers:
        yield "KDA", f"{len(text.kda_layers)} layers: {_kda_in_words(text)}"
    if text.mla_layers:
        yield "MLA", f"{len(text.mla_layers)} layers: {_mla_in_words(text)}"
        yield "", f"layers {', '.join(map(str, text.mla_layers))}, counted from 0"
    if dense := text.num_hidden_layers - len(text.moe_layers):
        yield "dense MLP", f"{dense} layer{'s' * (dense != 1)} of inner width {text.intermediate_size}"
    if text.moe_layers:
        yield "MoE", f"{len(text.moe_layers)} layers: {_experts_in_words(text)}"
        yield "router", _router_in_words(text)
    yield "activation", _activation_in_words(*text.activation_betas)
    if vision := config.vision:
        yield (
            "vision",
            f"{vision.vt_num_hidden_layers} blocks of width {vision.vt_hidden_size}, patch {vision.patch_size}",
        )


def _kda_in_words(text: TextConfig) -> str:
    bound = text.gate_lower_bound
    decay = "softplus log-decay" if bound is None else f"log-decay above {bound:g}"
    gate = "full-rank" if text.use_full_rank_gate else "low-rank"
    heads = f"{text.kda_num_heads} heads of {text.kda_head_dim}"
    return f"{heads}, convolution over {text.short_conv_kernel_size} tokens, {decay}, {gate} output gate"


def _mla_in_words(text: TextConfig) -> str:
    widths = f"keys {text.qk_nope_head_dim} + {text.qk_rope_head_dim} shared, values {text.v_head_dim}"
    queries = "queries of full rank" if text.q_lora_rank is None else f"queries of rank {text.q_lora_rank}"
    gate = "output gate" if text.mla_use_output_gate else "no output gate"
    return f"{text.num_attention_heads} heads, {widths}, latent {text.kv_lora_rank}, {queries}, {gate}"


def _experts_in_words(text: TextConfig) -> str:
    parts = [
        f"{text.num_experts} experts of inner width {text.moe_intermediate_size}, {text.num_experts_per_token} a token"
    ]
    if text.routed_expert_hidden_size:
        norm = ", normed" if text.latent_moe_use_norm else ""
        parts.append(f"in a latent space of {text.routed_expert_hidden_size}{norm}")
    if text.num_shared_experts:
        parts.append(f"{text.num_shared_experts} shared expert{'s' * (text.num_shared_experts != 1)}")
    return ", ".join(parts)


def _router_in_words(text: TextConfig) -> str:
    groups = f", from {text.topk_group} of {text.num_expert_group} groups" if text.num_expert_group > 1 else ""
    weights = "renormalised" if text.moe_renormalize else "as scored"
    return f"{text.moe_router_activation_func}{groups}, weights {weights}, times {text.routed_scaling_factor:g}"


def _activation_in_words(beta: float | None, linear_beta: float | None) -> str:
    if beta is None:
        return "SiLU"
    return f"SiTU, beta {beta:g}, " + (
        "linear part unbounded" if linear_beta is None else f"linear beta {linear_beta:g}"
    )


def _billions(count: int) -> str:
    return f"{count / 1e9:,.1f} B" if count >= 1e8 else f"{count / 1e6:,.1f} M"


def _bytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
