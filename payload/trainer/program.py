"""The computations of one step, as training calls them and as warm-up compiles them.

``TargetProgram`` turns tokens into features. ``DrafterProgram`` turns them into gradients and gradients into an
update. ``build_step`` gives either, or both, on made-up inputs of the recipe's static shapes and without the real
weights, so that compiling them needs neither the model's files nor data.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from payload.compile.policy import decide
from payload.data.batch import Batch
from payload.demo.target import demo_config
from payload.drafter.anchors import sample_anchors
from payload.drafter.config import DrafterConfig
from payload.drafter.fp8 import fp8_head, require_fp8
from payload.drafter.from_recipe import config_of
from payload.drafter.loss import LossConfig
from payload.drafter.model import DFlashDrafter
from payload.drafter.step import LossOutput, drafter_loss
from payload.errors import PayloadError
from payload.places import place, place_or_hub_name
from payload.recipe import Recipe
from payload.seeds import seed_of
from payload.target import Target, random_model
from payload.trainer.optimizer import MasterAdamW
from payload.trainer.shards import shard
from payload.trainer.transfer import Supply, SupplyShape

Role = Literal["target", "drafter", "both"]

DEMO_MASK_TOKEN = 3

_FLOAT16_NOMINAL = 16.0
"""What losses are divided by before the backward pass of a float16 run, whose type holds 6e-5 to 65,504 in full.

A hidden state's gradient is of the size of the head's weights, 0.01, and less where a slot weighs little or is right
already; a weight's gradient is the sum over ten thousands of tokens. A sixteenth leaves both room. Division by the
number of slots, which other types take, would leave the first 1e-7.
"""


@dataclass(frozen=True)
class TargetProgram:
    """The target's part: features, and its final hidden states when the loss compares distributions."""

    target: Target
    layer_ids: tuple[int, ...]
    with_teacher: bool

    def produce(self, batch: Batch) -> Supply:
        """Features [B,S,n*H] of a batch on the target's device, packed documents kept apart."""
        where = {"document_ids": batch.document_ids, "position_ids": batch.position_ids}
        if self.with_teacher:
            features, final = self.target.features_and_final(batch.input_ids, self.layer_ids, **where)
            return Supply(batch, features, final)
        return Supply(batch, self.target.features(batch.input_ids, self.layer_ids, **where), None)


class DrafterProgram:
    """The drafter's part on one rank: forward, backward and update.

    Parameters are fp32, the master weights; the forward pass casts each to the type of the features. Gradients are
    of ``loss_sum / nominal``, a constant, so that micro-batches and ranks simply add up; the update divides by the
    total weight of all of them.
    """

    def __init__(
        self,
        recipe: Recipe,
        drafter: DFlashDrafter,
        head_weight: torch.Tensor,
        embedding_weight: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        compiled: bool = False,
    ) -> None:
        self.drafter = drafter
        if recipe.train.fp8:
            require_fp8(head_weight.device)
        self.head = fp8_head(head_weight) if "head" in recipe.train.fp8 else head_weight
        if "mlp" in recipe.train.fp8:
            drafter.use_fp8_mlp()
        self.embedding_weight = embedding_weight
        self.device = embedding_weight.device
        self.drafters = group.size() if group is not None else 1
        self._num_anchors = recipe.train.num_anchors
        self._seed = recipe.train.seed
        self._loss_config = LossConfig(
            kind=recipe.loss.kind, gamma=recipe.loss.gamma, dpace_alpha=recipe.loss.dpace_alpha
        )
        slots = recipe.train.batch_size * recipe.train.num_anchors * (drafter.config.block_size - 1)
        self._nominal = _FLOAT16_NOMINAL if embedding_weight.dtype == torch.float16 else float(slots)
        self._generator = torch.Generator(device=self.device)
        self._sharded = False
        self._module: nn.Module = drafter
        if group is not None and recipe.train.shard == "fsdp2":
            self._sharded = True
            shard(drafter, group, self.device, compiled)
        elif compiled:
            drafter.compile(dynamic=False, fullgraph=True)
        if group is not None and not self._sharded:
            # A compiled drafter stays the one graph that warm-up compiled: torch would cut it at the bounds of DDP's
            # buckets, and some versions refuse to cut a graph with flex_attention in it.
            torch._dynamo.config.optimize_ddp = False
            self._module = DistributedDataParallel(drafter, process_group=group, gradient_as_bucket_view=True)
        self.optimizer = MasterAdamW(drafter.parameters(), recipe.optim)

    def accumulate(self, supply: Supply, micro_batch: int, last: bool) -> torch.Tensor:
        """Add the gradient of one micro-batch; reduce gradients over the drafters when it is the step's last.

        Features, or a teacher, that are not finite count as a micro-batch of weight 0: every rank still does the same
        work, so none waits for another. Returns this micro-batch's sums, float64 [4 + 3K] on the device (``Totals``),
        to which a loss that is not finite adds nothing either.
        """
        self._generator.manual_seed(seed_of(self._seed, micro_batch))
        batch = supply.batch
        anchors = sample_anchors(batch.loss_mask, batch.document_ids, self._num_anchors, self._generator)
        # One pass: a sum is finite only if all of its terms are.
        finite = torch.isfinite(supply.features.sum(dtype=torch.float32))
        if supply.teacher is not None:
            finite &= torch.isfinite(supply.teacher.sum(dtype=torch.float32))
        features = torch.where(finite, supply.features, 0)
        teacher = None if supply.teacher is None else torch.where(finite, supply.teacher, 0)
        self._synchronize(last)
        with _keep_less(), _trace_once():
            output = drafter_loss(
                self._module,
                self.head,
                self.embedding_weight,
                batch,
                features,
                anchors,
                self._loss_config,
                teacher,
            )
        # Multiplying keeps the graph, so that the backward pass below runs on every rank.
        kept = finite.to(output.loss_sum.dtype)
        (output.loss_sum * kept / self._nominal).backward()
        return _sums(output, finite)

    def update(self, totals: torch.Tensor, lr: float) -> torch.Tensor:
        """One optimizer step from the accumulated gradients and the sums of all drafters.

        Nothing changes when the total weight is 0 or a gradient is not finite. Returns the gradient's norm before
        clipping (a scalar on the device), of the mean loss; not finite if, and only if, the step changed nothing.
        """
        # Gradients were averaged over the drafters and divided by the nominal weight.
        unit = totals[1] / (self.drafters * self._nominal)
        return self.optimizer.step(lr, unit)

    def _synchronize(self, last: bool) -> None:
        if isinstance(self._module, DistributedDataParallel):
            self._module.require_backward_grad_sync = last
        elif self._sharded:
            self.drafter.set_requires_gradient_sync(last)  # type: ignore[operator]


def _keep_less() -> AbstractContextManager[None]:
    """Where a forward pass compiles: what is cheap is computed again in the backward pass even if a product reads it
    there (norms, rotations, SwiGLU's output), for a third less memory between the two."""
    from torch._functorch import config

    return config.patch(ban_recompute_materialized_backward=False)


def _trace_once() -> AbstractContextManager[None]:
    """Where a forward pass compiles: what was traced for it and its backward pass comes from the compile cache too.

    By default torch holds a graph with autograd functions of our own back from that cache, and traces it in every
    process anew. Their code is in the cache's fingerprint.
    """
    from torch._functorch import config

    return config.patch(autograd_cache_allow_custom_autograd_functions=True)


def _sums(output: LossOutput, finite: torch.Tensor) -> torch.Tensor:
    """loss_sum, weight_sum, skipped micro-batches, micro-batches, then correct, counted and accepted by position."""
    loss, weight = output.loss_sum.detach().double(), output.weight_sum.double()
    counts = finite & torch.isfinite(loss) & torch.isfinite(weight)
    skipped = 1 - counts.double()
    by_position = (output.correct_by_position, output.count_by_position, output.accepted_by_position)
    # Chosen, not multiplied: 0 times NaN is NaN.
    kept = [torch.where(counts, each, 0) for each in (loss[None], weight[None], *by_position)]
    return torch.cat([*kept[:2], skipped[None], torch.ones_like(skipped)[None], *kept[2:]])


def drafter_config_for(recipe: Recipe, target_config: Any, mask_token_id: int | None) -> DrafterConfig:
    """The drafter's configuration; the recipe's mask token wins over the tokenizer's.

    Raises ``PayloadError`` when neither names one: a wrong row costs acceptance and nothing would say so.
    """
    spec = recipe.drafter
    mask = spec.mask_token_id if spec.mask_token_id is not None else mask_token_id
    if mask is None:
        raise PayloadError(
            "No mask token: the target's tokenizer has none.",
            hint="Set drafter.mask_token_id to a reserved row of the target's embedding that no text uses.",
            kind="usage",
        )
    return config_of(spec, target_config, mask)


def supply_shape(recipe: Recipe, config: DrafterConfig, dtype: torch.dtype) -> SupplyShape:
    """The static shapes of what travels from targets to drafters."""
    return SupplyShape(
        batch_size=recipe.train.batch_size,
        length=recipe.data.max_length,
        features=len(config.target_layer_ids) * config.hidden_size,
        teacher=config.hidden_size if recipe.loss.kind == "kl" else 0,
        dtype=dtype,
    )


def compiles_target(recipe: Recipe, device: torch.device) -> bool:
    """Whether the target's layers are compiled: on a GPU, unless the recipe says ``compile: off``.

    On a CPU their matrix products are all that takes time, and compiling them gains nothing.
    """
    return device.type == "cuda" and recipe.compile != "off"


class StepProgram:
    """One rank's step on made-up inputs."""

    def __init__(
        self, batch: Batch, supply: Supply, target: TargetProgram | None, drafter: DrafterProgram | None
    ) -> None:
        self._batch = batch
        self._supply = supply
        self.target = target
        self.drafter = drafter

    def run_once(self) -> None:
        """Everything that one step of this role computes, backward pass and optimizer included."""
        supply = self._supply
        if self.target is not None:
            produced = self.target.produce(self._batch)
            # A drafter on another rank gets its features into buffers of its own, as here.
            supply = produced if self.drafter is not None else supply
        if self.drafter is not None:
            totals = self.drafter.accumulate(supply, micro_batch=0, last=True)
            self.drafter.update(totals, lr=1e-4)


def build_step(recipe: Recipe, role: Role, device: torch.device) -> StepProgram:
    """The step of a role with random weights and inputs, in the shapes and types of the real one."""
    target_config = _target_config(recipe)
    config = drafter_config_for(
        recipe, target_config, DEMO_MASK_TOKEN if recipe.target.model == "demo" else None
    )
    dtype = _target_dtype(recipe, target_config)
    shape = supply_shape(recipe, config, dtype)
    batch = _made_up_batch(shape, config, device)
    generator = torch.Generator(device=device).manual_seed(0)
    _, features, *teacher = (
        torch.randn(buffer.shape, device=device, generator=generator).to(dtype)
        for buffer in shape.buffers(device)
    )
    supply = Supply(batch, features, teacher[0] if teacher else None)
    target = drafter = None
    if role in ("target", "both"):
        target = TargetProgram(
            Target(random_model(target_config, dtype, device), compiles_target(recipe, device)),
            config.target_layer_ids,
            recipe.loss.kind == "kl",
        )
    if role in ("drafter", "both"):
        weights = torch.randn(config.vocab_size, config.hidden_size, device=device, generator=generator).to(
            dtype
        )
        drafter = DrafterProgram(
            recipe,
            DFlashDrafter(config).to(device),
            head_weight=weights,
            embedding_weight=weights,
            compiled=decide(recipe.compile, device.type).compiled and recipe.compile != "off",
        )
    return StepProgram(batch, supply, target, drafter)


def _made_up_batch(shape: SupplyShape, config: DrafterConfig, device: torch.device) -> Batch:
    rows = (shape.batch_size, shape.length)
    generator = torch.Generator(device=device).manual_seed(0)
    return Batch(
        input_ids=torch.randint(config.vocab_size, rows, device=device, generator=generator),
        loss_mask=torch.ones(rows, dtype=torch.bool, device=device),
        document_ids=torch.zeros(rows, dtype=torch.int32, device=device),
        position_ids=torch.arange(shape.length, device=device).expand(rows).contiguous(),
    )


def _target_config(recipe: Recipe) -> Any:
    if recipe.target.model == "demo":
        return demo_config()
    from transformers import AutoConfig

    options = {"gguf_file": recipe.target.gguf_file} if recipe.target.gguf_file else {}
    try:
        return AutoConfig.from_pretrained(
            place_or_hub_name(recipe.target.model),
            trust_remote_code=recipe.target.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        raise PayloadError(
            f"The config of the target {recipe.target.model} cannot be read, neither in the folder "
            f"{place(recipe.target.model)} nor on the hub: {str(error).splitlines()[0]}",
            hint="Put the model into that folder, or name another: target.model=<folder or hub name>.",
        ) from error


def _target_dtype(recipe: Recipe, target_config: Any) -> torch.dtype:
    if recipe.target.dtype != "auto":
        dtype: torch.dtype = getattr(torch, recipe.target.dtype)
        return dtype
    return getattr(target_config, "dtype", None) or torch.float32
