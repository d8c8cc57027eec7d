"""What a drafted block is trained on, as sums whose ratio does not depend on how a batch was split.

Slot k of a block predicts the token at anchor + k (no shift). Slot 0 is the anchor itself and carries no
loss. A slot counts while every token from anchor + 1 up to its own is supervised and lies in the anchor's
document: decoding never uses what a block drafts beyond the end of an answer.

Every loss is a weighted sum over slots, ``loss_sum``, with the sum of its weights, ``weight_sum``. Add both
over micro-batches and ranks, then divide once: the value and the gradient are those of the whole batch at
once.

- ``ce``: cross-entropy, weight exp(-(k - 1) / gamma) (DFlash, arXiv 2602.06036).
- ``dpace``: cross-entropy, weight from how far the block would be accepted (`dpace_weights`; arXiv
  2605.18810).
- ``kl``: KL(target || drafter) of the two next-token distributions, weighted as ``ce``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from payload.drafter.anchors import Anchors
from payload.drafter.fp8 import VALUES, Fp8Head, Scaled, product, scaled
from payload.drafter.row_slope import NARROW_SCALE, divergence_slope, narrowed, row_slope, wide
from payload.errors import PayloadError

_GAMMA_BY_BLOCK_SIZE = {8: 4.0, 10: 5.0, 16: 7.0}


@dataclass(frozen=True)
class LossConfig:
    """``gamma`` is the decay length in slots (None: `default_gamma`); ``dpace_alpha`` in (0, 1) floors
    confidences; ``chunk_rows`` is how many rows of logits exist at once. Raises PayloadError (kind
    "usage")."""

    kind: Literal["ce", "dpace", "kl"] = "ce"
    gamma: float | None = None
    dpace_alpha: float = 0.5
    chunk_rows: int = 5120

    def __post_init__(self) -> None:
        if self.kind not in ("ce", "dpace", "kl"):
            raise PayloadError(f"loss.kind knows no {self.kind!r}", "it is ce, dpace or kl", kind="usage")
        if self.gamma is not None and not (math.isfinite(self.gamma) and self.gamma > 0):
            raise PayloadError(f"loss.gamma must be positive, not {self.gamma!r}", kind="usage")
        if not 0 < self.dpace_alpha < 1:
            raise PayloadError(
                f"loss.dpace_alpha must lie between 0 and 1, not {self.dpace_alpha!r}",
                "0.3 to 0.7 is stable",
                kind="usage",
            )
        if self.chunk_rows < 1:
            raise PayloadError(f"loss.chunk_rows must be positive, not {self.chunk_rows!r}", kind="usage")


class DraftLoss(NamedTuple):
    """``loss_sum``, ``weight_sum``: scalars; ``correct[G, L]`` bool: the likeliest token is the label."""

    loss_sum: Tensor
    weight_sum: Tensor
    correct: Tensor


def default_gamma(block_size: int) -> float:
    """The published decay length of a block size (4 of 8, 5 of 10, 7 of 16), and 7/16 of any other."""
    return _GAMMA_BY_BLOCK_SIZE.get(block_size, 7 * block_size / 16)


def block_labels(
    input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, anchors: Anchors, block_size: int
) -> tuple[Tensor, Tensor]:
    """Labels [B, A, K] int64 and which of them count, bool [B, A, K].

    Never counted: slot 0, slots of invalid anchors, slots past the row, of another document, unsupervised, or
    behind an unsupervised one. A label that does not count is some token id of the row.
    """
    batch, length = input_ids.shape
    offsets = torch.arange(block_size, device=input_ids.device)
    index = anchors.positions[:, :, None] + offsets
    inside = index < length
    index = index.clamp(max=length - 1).flatten(1)
    shape = (batch, anchors.positions.shape[1], block_size)

    labels = input_ids.gather(1, index).view(shape)
    own_document = document_ids.gather(1, index).view(shape)
    own_document = own_document == document_ids.gather(1, anchors.positions)[:, :, None]
    supervised = loss_mask.gather(1, index).view(shape) & own_document & inside
    # The anchor is a clean token, so a break can only come after it.
    unbroken = (supervised | (offsets == 0)).long().cumprod(2).bool()
    return labels, unbroken & (offsets > 0) & anchors.valid[:, :, None]


def decay_weights(counted: Tensor, gamma: float) -> Tensor:
    """exp(-(k - 1) / gamma) in fp32 [..., L] where ``counted[..., L]``, for slots k = 1 .. L; else 0."""
    distance = torch.arange(counted.shape[-1], device=counted.device, dtype=torch.float32)
    return torch.exp(-distance / gamma) * counted


def dpace_weights(cross_entropy: Tensor, counted: Tensor, alpha: float) -> Tensor:
    """D-PACE's weights [..., L] of slots 1 .. L, detached: the expected drafts accepted from slot j on.

    With q = exp(-cross_entropy) and s = (1 - alpha) q + alpha, w_j = sum over m >= j of the product of s_1 ..
    s_m. A slot that does not count is 1 in products and 0 in sums (arXiv 2605.18810).
    """
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach()) + alpha
    reach = torch.where(counted, confidence, 1.0).cumprod(-1) * counted
    return reach.flip(-1).cumsum(-1).flip(-1) * counted


def slot_weights(cross_entropy: Tensor, counted: Tensor, config: LossConfig, block_size: int) -> Tensor:
    """The weights [..., L] of slots 1 .. L under this loss."""
    if config.kind == "dpace":
        return dpace_weights(cross_entropy, counted, config.dpace_alpha)
    return decay_weights(counted, config.gamma or default_gamma(block_size)).to(cross_entropy.dtype)


def reference_draft_loss(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    counted: Tensor,
    config: LossConfig,
    teacher: Tensor | None = None,
) -> DraftLoss:
    """`draft_loss` with all logits at once and autograd's own gradient: what the fast one must equal."""
    logits = wide(hidden @ head_weight.detach().T)
    log_probs = logits.log_softmax(-1)
    cross_entropy = -log_probs.gather(-1, labels[..., None])[..., 0]
    weights = slot_weights(cross_entropy, counted, config, block_size=labels.shape[1] + 1)
    loss = cross_entropy
    if config.kind == "kl":
        target = wide(_required(teacher) @ head_weight.T).log_softmax(-1)
        loss = (target.exp() * (target - log_probs)).sum(-1)
    return DraftLoss((weights * loss).sum(), weights.sum(), (logits.argmax(-1) == labels) & counted)


def draft_loss(
    hidden: Tensor,
    head: Tensor | Fp8Head,
    labels: Tensor,
    counted: Tensor,
    config: LossConfig,
    teacher: Tensor | None = None,
) -> DraftLoss:
    """The loss of G blocks at their L = K - 1 drafted slots, with at most ``config.chunk_rows`` rows of
    logits alive.

    ``hidden[G, L, H]`` of the drafter after its final norm; ``head[V, H]`` of the target, frozen: it gets
    no gradient; ``labels[G, L]`` int64; ``counted[G, L]`` bool; ``teacher[G, L, H]``, only for ``kl``:
    the target's normed final hidden states that predict the same tokens. The gradient for ``hidden`` is
    computed chunk by chunk together with the loss, so that no logits wait for the backward pass. Weights come
    after it, whatever they depend on: the gradient of a weighted row is the row's gradient times its weight.
    """
    if config.kind == "kl":
        teacher = _required(teacher).flatten(0, 1)
    rows = hidden.to(head.dtype) if isinstance(head, Tensor) else hidden
    losses, predicted = _HeadLoss.apply(
        rows.flatten(0, 1),
        head,
        labels.flatten(),
        teacher if config.kind == "kl" else None,
        config.chunk_rows,
        torch.is_grad_enabled() and hidden.requires_grad,
    )
    losses = losses.view(labels.shape)
    # Only D-PACE's weights look at the losses, which then are cross-entropies.
    weights = slot_weights(losses.detach(), counted, config, block_size=labels.shape[1] + 1)
    correct = (predicted.view(labels.shape) == labels) & counted
    return DraftLoss((weights * losses).sum(), weights.sum(), correct)


class _HeadLoss(torch.autograd.Function):
    """The loss of each row of ``hidden[R, H]`` and its likeliest token: ``losses[R]``, ``predicted[R]``.

    Cross-entropy with ``labels[R]``, or with ``teacher[R, H]`` KL(teacher's distribution || this row's).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor | Fp8Head,
        labels: Tensor,
        teacher: Tensor | None,
        chunk_rows: int,
        wants_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        teachers = [None] * -(-len(hidden) // chunk_rows) if teacher is None else teacher.split(chunk_rows)
        losses, predicted, gradients = [], [], []
        for rows, label, of_target in zip(
            hidden.split(chunk_rows), labels.split(chunk_rows), teachers, strict=True
        ):
            # In a function of its own, so that a chunk's logits are gone before the next chunk's come.
            loss, likeliest, gradient = _chunk(rows, head, label, of_target, wants_gradient)
            losses.append(loss)
            predicted.append(likeliest)
            gradients.append(gradient)
        if wants_gradient:
            ctx.save_for_backward(torch.cat(gradients))
        predictions = torch.cat(predicted)
        ctx.mark_non_differentiable(predictions)
        return torch.cat(losses), predictions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, unused: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return ((gradient * grad_losses[:, None]).to(gradient.dtype), *(None,) * 5)


def _chunk(
    hidden: Tensor, head: Tensor | Fp8Head, labels: Tensor, teacher: Tensor | None, wants_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [R], likeliest tokens [R] and, if wanted, the losses' gradients [R, H], of ``hidden[R, H]``."""
    logits, narrow = head_logits(hidden, head), isinstance(head, Fp8Head)
    if teacher is None:
        found = row_slope(logits, labels, narrow)
    else:
        found = divergence_slope(logits, head_logits(teacher, head))
        found = found._replace(slope=narrowed(found.slope)) if narrow else found
    gradient = hidden_gradient(found.slope, head, hidden.dtype) if wants_gradient else hidden
    return found.loss, found.predicted, gradient


def head_logits(hidden: Tensor, head: Tensor | Fp8Head) -> Tensor:
    """Logits [R, V] of ``hidden[R, H]``, in its dtype."""
    if isinstance(head, Fp8Head):
        return product(scaled(hidden, VALUES), head.weight, hidden.dtype, precise=False)
    return hidden @ head.T


def hidden_gradient(slope: Tensor, head: Tensor | Fp8Head, dtype: torch.dtype) -> Tensor:
    """The gradient [R, H] that ``slope[R, V]`` of the logits brings to the hidden states."""
    if isinstance(head, Fp8Head):
        unit = torch.full((), NARROW_SCALE, device=slope.device)
        into = Scaled(head.transposed, head.weight.scale)
        return product(Scaled(slope, unit), into, dtype, precise=True)
    return slope @ head


def simulated_accepted_length(accepted_by_position: Tensor, count_by_position: Tensor) -> Tensor:
    """The accepted length that greedy decoding would have on the training text, a scalar on the device.

    1 + sum over k >= 1 of a_k / n_k, with n_k the blocks whose slot k counts and a_k those of them whose
    slots 1 .. k are all right (`LossOutput`). The 1 is the target's own token after the accepted drafts. It
    equals the real one where the training text is what the target itself would say and is equally hard throughout.
    Otherwise the real one is lower: anchors lie evenly over the text, while a decoder spends most of its forwards
    where drafting is hard.
    """
    reached = accepted_by_position[1:] / count_by_position[1:].clamp(min=1)
    return 1 + reached.sum()


def _required(teacher: Tensor | None) -> Tensor:
    if teacher is None:
        raise PayloadError(
            "loss.kind kl needs the target's final hidden states",
            "compute them with the features",
            kind="usage",
        )
    return teacher
