"""The demo's target: a Qwen3 of half a million weights, trained on the demo's text in about a minute, kept on disk.

It is kept under ``<root>/targets/<name>/``, the name being a hash of all that decides its weights, so a repeat finds
it in a second. A damaged copy is built anew.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from payload.agent.layout import Layout
from payload.data.rows import Row
from payload.data.sealed import open_sealed, sealed_folder
from payload.data.tokens import Example, encode_row
from payload.demo import corpus, tokenizer
from payload.errors import PayloadError, ToldToStopError

STEPS = 240
BATCH = 32
PEAK_LR = 4e-3
SEED = 0
LONGEST = 128
"""Tokens; the demo's rows stay well below."""

CONFIG = {
    "vocab_size": tokenizer.VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}

Report = Callable[[str], None]


def demo_config() -> Any:
    """The target's transformers config, without weights."""
    from transformers import Qwen3Config

    # The tokenizer gives its special tokens the first ids, in this order.
    return Qwen3Config(**CONFIG, pad_token_id=0, bos_token_id=None, eos_token_id=2)


def target_name(steps: int = STEPS) -> str:
    """16 hex digits of all that decides the weights: code, sizes, seed and the torch build."""
    parts = [
        inspect.getsource(corpus),
        inspect.getsource(tokenizer),
        Path(__file__).read_text(encoding="utf-8"),
    ]
    parts += [json.dumps(CONFIG, sort_keys=True), str(steps), torch.__version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def ensure_demo_target(
    root: Path, report: Report, should_stop: Callable[[], bool] = lambda: False, steps: int = STEPS
) -> Path:
    """The folder of the trained target, which transformers loads; trains it when it is not there or damaged.

    Raises ``PayloadError`` when ``should_stop`` says so before the training is over; nothing is kept then.
    """
    folder = Layout(root).targets / target_name(steps)
    if folder.is_dir():
        try:
            open_sealed(folder)
        except PayloadError as error:
            report(f"target: building it anew: {error.message}")
        else:
            report(f"target: using {folder}")
            return folder
    report(f"target: training a small Qwen3 for {steps} steps (once; kept in {folder})")
    started = time.monotonic()
    with sealed_folder(folder, steps=steps, torch=torch.__version__) as partial:
        train_demo_target(partial, report, should_stop, steps)
    report(f"target: ready after {time.monotonic() - started:.0f} s")
    return folder


def train_demo_target(folder: Path, report: Report, should_stop: Callable[[], bool], steps: int) -> None:
    """Train tokenizer and model from ``SEED`` and save both into ``folder``."""
    from transformers import Qwen3ForCausalLM

    texts = [turn["content"] for row in corpus.rows("train", 4000, SEED) for turn in row["messages"]]
    words = tokenizer.train_tokenizer(texts)
    notes: Counter[str] = Counter()
    examples = [
        encode_row(Row(dict(row), "demo"), words, LONGEST, 1, notes)
        for row in corpus.rows("train", steps * BATCH, SEED)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(demo_config()).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=0.1)
    started = time.monotonic()
    for step in range(steps):
        if should_stop():
            raise ToldToStopError("Told to stop while the target was being trained.")
        loss = _loss(model, examples[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 40 == 0 or step + 1 == steps:
            seconds = time.monotonic() - started
            report(f"target: step {step + 1}/{steps}  loss {loss.item():.3f}  {seconds:.0f} s")
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def _loss(model: Any, examples: list[Example]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens; rows are padded on the right, which a causal model never sees."""
    width = max(len(example.input_ids) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    supervised = torch.zeros(len(examples), width, dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.input_ids)] = torch.tensor(example.input_ids)
        supervised[row, : len(example.loss_mask)] = torch.tensor(example.loss_mask)
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    predicts = supervised[:, 1:]
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[predicts]), ids[:, 1:][predicts])
