"""One drafter step, from a batch, its features and anchors to the loss, for training and warm-up alike."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from payload.drafter.anchors import Anchors
from payload.drafter.attention import Kernel, kernel_for
from payload.drafter.config import DrafterConfig
from payload.drafter.fp8 import Fp8Head
from payload.drafter.loss import LossConfig, block_labels, draft_loss
from payload.drafter.masks import Mask, build_masks
from payload.drafter.model import BlockEmbeddings, Rotary, rotary_table


class TokenBatch(Protocol):
    """``input_ids[B, S]`` int64, ``loss_mask[B, S]`` bool, ``document_ids[B, S]`` int (-1 is padding),
    ``position_ids[B, S]`` int64 counted from each document's start."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def document_ids(self) -> Tensor: ...
    @property
    def position_ids(self) -> Tensor: ...


class BlockInputs(NamedTuple):
    """What the blocks of a batch are: embeddings, rotary tables of context and blocks, a mask for each layer type,
    labels [B, A, K] and which of them count [B, A, K]."""

    embeddings: BlockEmbeddings
    rotary: Rotary
    masks: dict[str, Mask]
    labels: Tensor
    counted: Tensor


class LossOutput(NamedTuple):
    """Sums over the batch, all on the device; add them over micro-batches and ranks before dividing.

    ``loss_sum / weight_sum`` is the loss. ``correct_by_position[K]``: slots whose likeliest token is the
    label; ``accepted_by_position[K]``: those of them with every earlier slot right too;
    ``count_by_position[K]``: slots that count. All int64; slot 0 is 0.
    """

    loss_sum: Tensor
    weight_sum: Tensor
    correct_by_position: Tensor
    count_by_position: Tensor
    accepted_by_position: Tensor


def drafter_loss(
    drafter: nn.Module,
    head_weight: Tensor | Fp8Head,
    embedding_weight: Tensor,
    batch: TokenBatch,
    features: Tensor,
    anchors: Anchors,
    loss_config: LossConfig,
    teacher_hidden: Tensor | None = None,
) -> LossOutput:
    """The loss of one batch, differentiable in the drafter's parameters.

    ``drafter``: a DFlashDrafter, or one wrapped by DDP or torch.compile. ``head_weight[V, H]`` and
    ``embedding_weight[V, H]`` are the target's, frozen. ``features[B, S, n*H]`` set the dtype of the
    computation. ``teacher_hidden[B, S, H]``, the target's normed final hidden states, only for the ``kl``
    loss.
    """
    config = drafter_config(drafter)
    inputs = block_inputs(
        config, embedding_weight, batch, anchors, features.dtype, kernel_for(features.device)
    )
    hidden = drafter(features, inputs.embeddings, inputs.rotary, inputs.masks)
    return block_loss(config, hidden, head_weight, inputs, anchors, loss_config, teacher_hidden)


def block_inputs(
    config: DrafterConfig,
    embedding_weight: Tensor,
    batch: TokenBatch,
    anchors: Anchors,
    dtype: torch.dtype,
    kernel: Kernel,
) -> BlockInputs:
    """Everything that the blocks of ``anchors`` need besides the features; no gradient flows through it."""
    size = config.block_size
    offsets = torch.arange(size, device=anchors.positions.device)
    anchor_tokens = batch.input_ids.gather(1, anchors.positions)
    embeddings = BlockEmbeddings(
        anchors=embedding_weight[anchor_tokens].to(dtype).detach(),
        mask=embedding_weight[config.mask_token_id].to(dtype).detach(),
    )
    slots = batch.position_ids.gather(1, anchors.positions)[:, :, None] + offsets
    positions = torch.cat([batch.position_ids, slots.flatten(1)], dim=1)
    labels, counted = block_labels(batch.input_ids, batch.loss_mask, batch.document_ids, anchors, size)
    return BlockInputs(
        embeddings=embeddings,
        rotary=rotary_table(positions, config, dtype),
        masks=build_masks(config, anchors, batch.document_ids, kernel),
        labels=labels,
        counted=counted,
    )


def block_loss(
    config: DrafterConfig,
    hidden: Tensor,
    head_weight: Tensor | Fp8Head,
    inputs: BlockInputs,
    anchors: Anchors,
    loss_config: LossConfig,
    teacher_hidden: Tensor | None = None,
) -> LossOutput:
    """The loss and the counts of the drafted slots, ``hidden[B, A, K - 1, H]``."""
    blocks = hidden.flatten(0, 1)
    labels, counted = inputs.labels.flatten(0, 1)[:, 1:], inputs.counted.flatten(0, 1)[:, 1:]
    teacher = None if teacher_hidden is None else _teacher_rows(teacher_hidden, anchors, config.block_size)
    loss = draft_loss(blocks, head_weight, labels, counted, loss_config, teacher)
    accepted = loss.correct.long().cumprod(1)
    return LossOutput(
        loss_sum=loss.loss_sum,
        weight_sum=loss.weight_sum,
        correct_by_position=_from_slot_one(loss.correct.sum(0)),
        count_by_position=_from_slot_one(counted.sum(0)),
        accepted_by_position=_from_slot_one(accepted.sum(0)),
    )


def drafter_config(drafter: nn.Module) -> DrafterConfig:
    """The configuration of a drafter, wrapped or not: DDP keeps the module under ``module``."""
    config = getattr(getattr(drafter, "module", drafter), "config", None)
    assert isinstance(config, DrafterConfig), f"{type(drafter).__name__} holds no DFlashDrafter"
    return config


def _teacher_rows(teacher_hidden: Tensor, anchors: Anchors, block_size: int) -> Tensor:
    """[B*A, K-1, H]: the target's hidden states at anchor + k - 1, which predict what slots k >= 1 draft."""
    offsets = torch.arange(block_size - 1, device=teacher_hidden.device)
    index = (anchors.positions[:, :, None] + offsets).clamp(max=teacher_hidden.shape[1] - 1).flatten(1)
    rows = teacher_hidden.gather(1, index[:, :, None].expand(-1, -1, teacher_hidden.shape[-1]))
    return rows.view(-1, block_size - 1, teacher_hidden.shape[-1])


def _from_slot_one(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts])
