"""The two ends of the model: the embedding and the output head, their vocabulary split over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, Piece


class VocabularyTable(Layer):
    """One row per token. Ranks hold equal shares of the vocabulary, padded with zero rows where it does not divide."""

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh, self.vocab_size = mesh, vocab_size
        self.share, part = mesh.vocab.padded_part(vocab_size)
        self.first, held = part.start, part.stop - part.start
        piece = Piece((vocab_size, hidden_size), (part,), (slice(0, held),))
        self.weight = self.allocate("weight", (self.share, hidden_size), piece, dtype)
        with torch.no_grad():
            self.weight[held:] = 0

    def _local(self) -> bool:
        """Whether the ranks that share the table also share their tokens."""
        return self.mesh.layout.enable_dp_lm_head or self.mesh.dp.size == 1

    def embed(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """ids [T] -> [T, H], complete; counts: the rows of each data-parallel replica."""
        if self.mesh.vocab.size == 1:
            return F.embedding(ids, self.weight)
        rows = ids if self._local() else self.mesh.all_replicas(ids, counts)
        local = rows - self.first
        held = (local >= 0) & (local < self.share)
        partial = F.embedding(local.clamp(0, self.share - 1), self.weight) * held.unsqueeze(-1)
        return self.mesh.vocab.all_reduce(partial) if self._local() else self.mesh.sum_own_rows(partial, counts)

    def logits(self, hidden: Tensor, counts: Sequence[int]) -> Tensor:
        """hidden [n, H] -> fp32 [n, vocab]; counts: the rows each replica wants logits of."""
        if self.mesh.vocab.size == 1:
            return F.linear(hidden, self.weight).float()
        rows = hidden if self._local() else self.mesh.all_replicas(hidden, counts)
        shares = self.mesh.vocab.all_gather(F.linear(rows, self.weight).t(), [self.share] * self.mesh.vocab.size)
        everyone = shares[: self.vocab_size].t().float()  # [rows, vocab]
        return everyone if self._local() else everyone[self.mesh.dp.bounds(counts)]
