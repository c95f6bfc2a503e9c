"""How images get into a prompt of SGLang.

SGLang's tokenizer process prepares them with the folder's processor, or with ours where a folder names it, and puts a
value of its own in the place of every image feature. In the pass that reads those places, our tower fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k3_npu.engines import images
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

#: The attribute of SGLang's model configuration that tells the model whether the launch takes images.
TAKES_IMAGES = "kimi_k3_npu_takes_images"


def wanted(model_path: str, asked: bool | None, revision: str | None = None) -> bool:
    """Whether a launch takes images; see `engines.images.wanted`."""
    return images.wanted(engine.SGLANG, model_path, asked, revision)


def embeddings(
    model: nn.Module, network: KimiK3ForCausalLM, input_ids: Tensor, batch: Any, counts: Sequence[int]
) -> Tensor:
    """Rows [T, H] of a batch that has images: SGLang's own bookkeeping of which parts of which images are in it."""
    return engine.prepare_mm_inputs(input_ids, batch, _TextModel(network, counts), {}, model)


def features(network: KimiK3ForCausalLM, items: Sequence[Any]) -> Tensor:
    """The rows of images end to end, as `get_image_feature` has to give them."""
    data = [item.model_specific_data for item in items]
    grids = torch.cat([each["image_grid_thw"] if "image_grid_thw" in each else each["grid_thws"] for each in data])
    return images.features(network, [item.feature for item in items], grids, split=engine.get_mm().mm_enable_dp_encoder)


class _TextModel:
    """What SGLang asks of a language model when it only wants embeddings."""

    def __init__(self, network: KimiK3ForCausalLM, counts: Sequence[int]) -> None:
        self._network, self._counts = network, counts

    def get_input_embeddings(self) -> _TextModel:
        return self

    @property
    def num_embeddings(self) -> int:
        return self._network.config.text.vocab_size

    def __call__(self, ids: Tensor) -> Tensor:
        return self._network.embed(ids, self._counts)
