"""Make the manifests of the two published W4A8 checkpoints from the official one's, by what is known of them.

Their files have not been seen. Known are ModelSlim's layout, which linear layers each mix quantises, and the published
sizes (1486 GB, and 1467 GB with 989,184 W4A8_DYNAMIC and 1,887 FLOAT entries), which what is made here adds up to.

usage: python weights/make_w4a8_manifests.py
"""

from __future__ import annotations

import json
import math
from pathlib import Path

FOLDER = Path(__file__).with_name("manifests")
BYTES = {"I8": 1, "U8": 1, "BF16": 2, "F32": 4}

#: ModelSlim quantises these to W8A8_DYNAMIC in both mixes, and in one of them these too.
SHARED = ("shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj")
SHARED += ("routed_expert_down_proj", "routed_expert_up_proj")
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION += ("self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa")
ATTENTION += ("{L}.mlp.gate_proj", "{L}.mlp.up_proj", "{L}.mlp.down_proj")

NOTES = [
    "Inferred, not read: no file of this checkpoint has been seen. Names and shapes are ModelSlim's for the official "
    "checkpoint's tensors; the mix of W4A8 and W8A8 is the one that gives the published size.",
    "weight of an expert holds two rows a byte, the even one in the low nibble; scale_bias of w2 is 16 partial sums.",
    "{L}, {E}, {B} and `layers` are as in kimi-k3-mxfp4.json.",
]
MIXES = {
    "kimi-k3-w4a8-sgl-npu": ("ModelScope sgl-npu/Kimi-K3-W4A8", SHARED, False),
    "kimi-k3-w4a8-eco-tech": ("ModelScope Eco-Tech/Kimi-K3-w4a8", SHARED + ATTENTION, True),
}


def w4a8(pattern: dict) -> list[dict]:
    """An expert's MXFP4 codes [O, I/2] as the four tensors of W4A8."""
    outputs, inputs = pattern["shape"][0], 2 * pattern["shape"][1]
    stem = pattern["name"].removesuffix(".weight_packed")
    shapes = {
        "weight": ([outputs // 2, inputs], "I8"),
        "weight_scale": ([outputs, 1], "F32"),
        "weight_offset": ([outputs, 1], "F32"),
        "scale_bias": ([outputs, 16 if stem.endswith("w2") else 1], "F32"),
    }
    return [
        {**pattern, "name": f"{stem}.{part}", "shape": shape, "dtype": dtype} for part, (shape, dtype) in shapes.items()
    ]


def w8a8(pattern: dict) -> list[dict]:
    """A linear layer's weight [O, I] as the three tensors of W8A8."""
    scale = {"shape": [pattern["shape"][0], 1], "dtype": "F32"}
    return [
        {**pattern, "dtype": "I8"},
        {**pattern, "name": f"{pattern['name']}_scale", **scale},
        {**pattern, "name": f"{pattern['name']}_offset", **scale},
    ]


def patterns(official: list[dict], linears: tuple[str, ...], rotated: bool) -> list[dict]:
    found: list[dict] = []
    for pattern in official:
        name = pattern["name"]
        if name.endswith(".weight_packed"):
            found += w4a8(pattern)
        elif name.removesuffix(".weight").endswith(linears):
            found += w8a8(pattern)
        elif not name.endswith(".weight_scale"):
            found.append(pattern)
    if rotated:
        found.append({"name": "mm_projector.rot_proj.weight", "count": 1, "shape": [7168, 7168], "dtype": "BF16"})
    return found


def main() -> None:
    official = json.loads((FOLDER / "kimi-k3-mxfp4.json").read_text(encoding="utf-8"))
    for name, (source, linears, rotated) in MIXES.items():
        found = patterns(official["patterns"], linears, rotated)
        head = {
            "name": name,
            "source": source,
            "notes": NOTES,
            "total_tensors": sum(pattern["count"] for pattern in found),
            "total_bytes": sum(p["count"] * math.prod(p["shape"]) * BYTES[p["dtype"]] for p in found),
            "shards": None,
        }
        lines = ",\n".join(f"    {json.dumps(pattern)}" for pattern in found)
        text = json.dumps(head, indent=2).removesuffix("\n}") + f',\n  "patterns": [\n{lines}\n  ]\n}}\n'
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
