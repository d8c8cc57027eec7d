"""Small configurations, batches and strategies that the drafter's tests share."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from payload.data.batch import Batch, positions_of
from payload.drafter.anchors import Anchors, sample_anchors
from payload.drafter.config import DrafterConfig

VOCABULARY = 50


def tiny_config(**changes: Any) -> DrafterConfig:
    values: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "block_size": 4,
        "mask_token_id": VOCABULARY - 1,
        "target_layer_ids": (1, 3),
        "num_target_layers": 6,
    }
    return DrafterConfig(**(values | changes))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_batch(
    seed: int, rows: int = 2, length: int = 24, documents: int = 3, supervised: float = 0.8
) -> Batch:
    """Rows of up to ``documents`` packed documents with padding at the end and a random loss mask."""
    generator = seeded(seed)
    cuts = torch.randint(0, length + 1, (rows, documents), generator=generator).sort(1).values
    index = torch.arange(length).expand(rows, -1)
    document_ids = (index[:, :, None] >= cuts[:, None, :-1]).sum(2).int()
    document_ids[index >= cuts[:, -1:]] = -1
    loss_mask = (torch.rand(rows, length, generator=generator) < supervised) & (document_ids >= 0)
    return Batch(
        input_ids=torch.randint(0, VOCABULARY - 1, (rows, length), generator=generator),
        loss_mask=loss_mask,
        document_ids=document_ids,
        position_ids=positions_of(document_ids),
    )


def anchors_of(batch: Batch, count: int, seed: int = 0) -> Anchors:
    return sample_anchors(batch.loss_mask, batch.document_ids, count, seeded(seed))


batches = st.builds(
    random_batch,
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    length=st.integers(2, 30),
    documents=st.integers(1, 4),
    supervised=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
)
