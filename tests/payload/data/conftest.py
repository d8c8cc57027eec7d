from __future__ import annotations

from typing import Any

import pytest

from payload.demo import corpus, tokenizer


@pytest.fixture(scope="session")
def words() -> Any:
    """The demo's tokenizer, trained on a few rows."""
    return tokenizer.train_tokenizer(
        turn["content"] for row in corpus.rows("train", 200) for turn in row["messages"]
    )
