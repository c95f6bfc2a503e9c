"""The text model with its head: token ids in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.attention import Attention, CachedAttention
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.decoder import DecoderLayer
from kimi_k3_npu.model.norm import RMSNorm
from kimi_k3_npu.model.residual import ResidualMixer
from kimi_k3_npu.model.vision import Projector, VisionTower
from kimi_k3_npu.model.vocabulary import VocabularyTable
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import layers


class KimiK3ForCausalLM(nn.Module):
    """Kimi-K3 (or Kimi-Linear) on one rank of `mesh`, weights uninitialised; `load_model` makes a filled one.

    Of a pipeline, it holds the layers of the mesh's stage; the embedding (and vision) are with the first stage, the
    final norm and the head with the last; where embedding and head are one table, both have it. `experts` names the
    format in which routed experts are kept. With a vision config and `vision=True` the tower and projector are built,
    with `rotated_vision` for a rotated text model.
    """

    def __init__(
        self,
        config: KimiK3Config,
        mesh: Mesh | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        experts: str = "plain",
        vision: bool = True,
        rotated_vision: bool = False,
    ) -> None:
        super().__init__()
        mesh, text = mesh or Mesh(), config.text
        self.config, self.mesh, self.dtype, self.experts = config, mesh, dtype, experts
        self.is_first, self.is_last = mesh.stage == 0, mesh.stage == mesh.layout.pp - 1
        table = (text.vocab_size, text.hidden_size, mesh, dtype)
        tied = text.tie_word_embeddings
        self.embed_tokens = VocabularyTable(*table) if self.is_first or (tied and self.is_last) else None
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(text, i, mesh, dtype, experts=experts)
                for i in mesh.layout.stage_layers(mesh.stage, text)
            }
        )
        mixes = text.attn_res_block_size is not None and self.is_last
        self.output_attn_res = ResidualMixer(text.hidden_size, text.rms_norm_eps) if mixes else None
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype) if self.is_last else None
        self.lm_head = None if not self.is_last else self.embed_tokens if tied else VocabularyTable(*table)
        tower = config.vision if vision and self.is_first else None
        self.vision_tower = VisionTower(tower, dtype) if tower else None
        self.mm_projector = Projector(tower, dtype, rotated=rotated_vision) if tower else None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self,
        input_ids: Tensor,
        attention: Attention,
        inputs_embeds: Tensor | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """input_ids [T] (or their embeddings [T, H]) -> final hidden states [T, H], normed.

        counts: the rows of each data-parallel replica in this pass; asked of the other ranks when not given.
        """
        if counts is None:
            tokens = len(input_ids) if inputs_embeds is None else len(inputs_embeds)
            counts = self.mesh.token_counts(tokens, self.device)
        prefix = self.embed(input_ids, counts) if inputs_embeds is None else inputs_embeds
        prefix, bank = self.run_layers(prefix, empty_bank(prefix), attention, counts)
        return self.finish(prefix, bank)

    def embed(self, input_ids: Tensor, counts: Sequence[int]) -> Tensor:
        """[T] -> [T, H]. First stage only."""
        assert self.embed_tokens is not None
        return self.embed_tokens.embed(input_ids, counts)

    def run_layers(
        self,
        prefix: Tensor,
        bank: Tensor,
        attention: Attention,
        counts: Sequence[int],
        after_layer: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """This stage's layers. The running sum [T, H] and the bank [T, B, H] are what crosses a stage boundary.

        after_layer: called with each layer's index, and the sum and bank that it leaves (see `read_after`).
        """
        for index, layer in self.layers.items():
            prefix, bank = layer(prefix, bank, attention, counts)
            if after_layer:
                after_layer(int(index), prefix, bank)
        return prefix, bank

    def read_after(self, layer: int, prefix: Tensor, bank: Tensor) -> Tensor:
        """What follows `layer`, the next layer or the final norm, reads of its sum and bank: [T, H], not yet normed."""
        following = str(layer + 1)
        mixer: Any = self.layers[following].self_attention_res if following in self.layers else self.output_attn_res
        return prefix if mixer is None else mixer(prefix, bank)

    def finish(self, prefix: Tensor, bank: Tensor) -> Tensor:
        """The final mixture and norm: [T, H]. Last stage only."""
        assert self.norm is not None
        return self.norm(prefix if self.output_attn_res is None else self.output_attn_res(prefix, bank))

    def logits(self, hidden: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """hidden [n, H] -> fp32 [n, vocab]; counts: the rows of each replica, asked of the other ranks when not
        given."""
        assert self.lm_head is not None
        if counts is None:
            counts = self.mesh.token_counts(len(hidden), self.device)
        return self.lm_head.logits(hidden, counts)

    def new_cache(self, num_slots: int, max_tokens: int) -> ModelCache:
        """A cache for `num_slots` sequences of up to `max_tokens` tokens, in this model's dtype, on its device."""
        return ModelCache(
            self.config.text,
            num_slots,
            max_tokens,
            dtype=self.dtype,
            device=self.device,
            attn_tp=self.mesh.attn_tp,
        )

    @torch.inference_mode()
    def score(self, prompts: Sequence[Tensor]) -> list[Tensor]:
        """Logits at every position of every prompt, all prompts in one ragged batch.

        Each prompt is int64 [T] with T >= 1; returns one fp32 [T, vocab] per prompt. Several ranks call it together,
        each with the prompts of its data-parallel replica, possibly none. Raises ValueError for an empty prompt or a
        token id outside the vocabulary.
        """
        for i, prompt in enumerate(prompts):
            self.check_token_ids(prompt, f"prompt {i}")
        lengths = [len(prompt) for prompt in prompts]
        cache = self.new_cache(len(prompts), max(lengths, default=0))
        attention = CachedAttention(cache, [cache.join() for _ in prompts], lengths)
        none = torch.empty(0, dtype=torch.long, device=self.device)
        ids = torch.cat([none, *(prompt.to(self.device) for prompt in prompts)])
        logits = self.logits(self(ids, attention))  # also with nothing to score: other replicas need this rank
        return list(logits.split(lengths)) if lengths else []

    def check_token_ids(self, ids: Tensor, what: str) -> None:
        """Raises ValueError unless `ids` is a non-empty 1-D tensor of ids within the vocabulary."""
        vocab = self.config.text.vocab_size
        if ids.ndim != 1 or not ids.numel():
            raise ValueError(f"{what} has shape {list(ids.shape)}, expected token ids [T] with T >= 1")
        if ids.is_floating_point():
            raise ValueError(f"{what} has dtype {ids.dtype}, expected integer token ids")
        if (low := int(ids.min())) < 0 or int(ids.max()) >= vocab:
            wrong = low if low < 0 else int(ids.max())
            raise ValueError(f"{what} holds token id {wrong}, outside the vocabulary 0..{vocab - 1}")

    def prepare(self) -> None:
        """Derive what layers compute once from their weights; to be called after every change of the weights."""
        for _, layer in layers(self):
            layer.prepare()

    def is_elsewhere(self, parameter: str) -> bool:
        """Whether another pipeline stage of this layout holds `parameter` (a dotted path)."""
        first, _, rest = parameter.partition(".")
        if first == "layers":
            layer = int(rest.partition(".")[0])
            return layer < self.config.text.num_hidden_layers and str(layer) not in self.layers
        if first == "embed_tokens":
            return self.embed_tokens is None
        on_first = {"vision_tower", "mm_projector"}
        return (first in on_first and not self.is_first) or (first not in on_first and not self.is_last)


def empty_bank(prefix: Tensor) -> Tensor:
    """The bank before the first layer: [T, 0, H]."""
    return prefix.new_empty(prefix.shape[0], 0, prefix.shape[1])
