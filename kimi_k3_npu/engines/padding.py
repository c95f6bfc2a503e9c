"""Padded batches [B, L], as transformers has them, beside the ragged ones [T] of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k3_npu.errors import KimiK3Error

#: A label that is not to be predicted.
NO_LABEL = -100


def real_tokens(mask: Tensor | None, rows: Tensor, past: int, seen: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Which of the new columns hold tokens, bool [B, L], and how many do in each row.

    Args:
        mask: [B, past + L], 1 for a token and 0 for none; None when there is no padding.
        rows: The new columns, [B, L] or [B, L, H].
        past: Columns before them.
        seen: Tokens in those, of each row.

    Raises ValueError for a mask that is not of this form, or that has other tokens in the columns before.
    """
    batch, columns = rows.shape[:2]
    if mask is None:
        return torch.ones(batch, columns, dtype=torch.bool, device=rows.device), [columns] * batch
    if tuple(mask.shape) != (batch, past + columns):
        raise ValueError(
            f"attention_mask is {list(mask.shape)}, expected [{batch}, {past + columns}]: {past} columns seen "
            f"before and {columns} new ones"
        )
    tokens = mask == 1
    before, new, strange = torch.stack(  # one answer from the device
        [tokens[:, :past].sum(dim=1), tokens[:, past:].sum(dim=1), (~tokens & (mask != 0)).sum(dim=1)]
    ).tolist()
    if any(strange):
        raise ValueError("attention_mask holds other values than 1 for a token and 0 for none")
    if before != list(seen):
        raise ValueError(f"attention_mask has {before} tokens in the columns seen before, but {list(seen)} were seen")
    return tokens[:, past:], new


def check_prompts(mask: Tensor, chunk_size: int | None) -> None:
    """Raises KimiK3Error for a batch [B, L] of prompts from which generation cannot go on."""
    if empty := (mask == 0).all(dim=1).nonzero()[:, 0].tolist():
        raise KimiK3Error(f"attention_mask marks no token in row {empty[0]}; generation needs at least one to continue")
    if chunk_size is not None and bool((mask[:, -1] == 0).any()):
        raise KimiK3Error(f"prefill_chunk_size = {chunk_size} needs prompts padded on the left, some are on the right")


def kept_tokens(real: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Each row's last `count` tokens, bool [B, L], and the column [B, L] that each has among `count`, to the right; for
    0 all tokens, where they are."""
    columns = torch.arange(real.shape[1], device=real.device).expand_as(real)
    if not count:
        return real, columns
    from_end = real.flip(1).cumsum(dim=1).flip(1)  # 1 for the last token of a row
    return real & (from_end <= count), count - from_end


def next_token_loss(logits: Tensor, labels: Tensor, real: Tensor, num_items: Tensor | int | None) -> Tensor:
    """logits [T, vocab] of the real tokens, labels [B, L] -> the loss of each row's next tokens: the mean, or the sum
    over num_items."""
    row = real.nonzero()[:, 0]
    targets = labels[real].roll(-1).masked_fill(row != row.roll(-1), NO_LABEL)  # [T]
    targets[-1:] = NO_LABEL
    if num_items is None:
        return F.cross_entropy(logits, targets, ignore_index=NO_LABEL)
    return F.cross_entropy(logits, targets, ignore_index=NO_LABEL, reduction="sum") / num_items
