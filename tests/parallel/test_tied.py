"""Tied embeddings over pipeline stages: the first looks ids up in the table, and the last scores with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3_npu import load_model
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM, empty_bank
from kimi_k3_npu.parallel.layout import ParallelLayout

ORACLE = Path(__file__).parents[1] / "oracle" / "k3"
HEAD, TABLE = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The k3 oracle without its head."""
    folder = shutil.copytree(ORACLE, tmp_path_factory.mktemp("tied") / "k3")
    for file in folder.glob("model-*.safetensors"):
        tensors = load_file(file)
        tensors.pop(HEAD, None)
        save_file(tensors, file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    del listed["weight_map"][HEAD]
    index.write_text(json.dumps({"metadata": {}, "weight_map": listed["weight_map"]}))
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def stages(folder: Path, count: int) -> list[KimiK3ForCausalLM]:
    layout = ParallelLayout(pp=count)
    return [load_model(folder, layout=layout, rank=rank) for rank in range(count)]


@pytest.mark.parametrize("count", [2, 3])
@torch.inference_mode()
def test_stages_give_the_logits_of_one_rank(tied: Path, count: int) -> None:
    ids = torch.tensor([3, 14, 15, 92, 6])
    whole = load_model(tied)
    (wanted,) = whole.score([ids])
    parts = stages(tied, count)
    prefix = parts[0].embed(ids, [len(ids)])
    bank = empty_bank(prefix)
    for part in parts:
        cache = whole.new_cache(1, len(ids))
        attention = CachedAttention(cache, [cache.join()], [len(ids)])
        prefix, bank = part.run_layers(prefix, bank, attention, [len(ids)])
    found = parts[-1].logits(parts[-1].finish(prefix, bank), [len(ids)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def test_only_the_ends_hold_the_table(tied: Path) -> None:
    table = next(tensors[TABLE] for file in tied.glob("model-*") if TABLE in (tensors := load_file(file)))
    first, middle, last = stages(tied, 3)
    for end in (first, last):
        assert end.embed_tokens is not None
        assert torch.equal(end.embed_tokens.weight, table)
    assert last.lm_head is last.embed_tokens
    assert (first.lm_head, middle.embed_tokens, middle.lm_head) == (None, None, None)


def test_untied_the_table_is_with_the_first_stage_alone() -> None:
    first, last = stages(ORACLE, 2)
    assert (first.lm_head, last.embed_tokens) == (None, None)
    assert last.lm_head is not None
