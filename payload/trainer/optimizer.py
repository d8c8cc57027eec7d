"""AdamW on fp32 master weights, with clipping and the skipping of unusable steps on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from payload.recipe import OptimSpec
from payload.trainer.shards import part_like, whole_tensor


class MasterAdamW:
    """AdamW over fp32 parameters; moments are fp32 too.

    Weight decay applies to matrices alone, not to norms. Nothing waits for the device: dividing by the total weight,
    clipping and skipping are tensors that the fused kernel reads, which works on shards as on whole parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optim: OptimSpec) -> None:
        self.parameters = list(parameters)
        self._clip = optim.clip
        matrices = [parameter for parameter in self.parameters if parameter.dim() > 1]
        vectors = [parameter for parameter in self.parameters if parameter.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": optim.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            fused=True,
        )

    def step(self, lr: float, unit: torch.Tensor) -> torch.Tensor:
        """Divide the gradients by ``unit`` (a scalar), clip their norm, update, and clear them.

        The parameters and moments stay as they are when ``unit`` is 0 or the norm is not finite. Returns the norm
        before clipping, a scalar on the device; it is not finite in both cases.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = whole_tensor(torch.nn.utils.get_total_norm(gradients)).double() / unit
        usable = torch.isfinite(norm) & (unit > 0)
        # Gradients of magnitude ``unit`` are divided by this scale inside the update.
        scale = torch.where(usable, unit * (norm / self._clip).clamp(min=1.0), 1.0).float()
        # What torch.amp.GradScaler hands to fused optimizers: divide by one, skip by the other.
        self._adamw.grad_scale = scale  # type: ignore[attr-defined]
        self._adamw.found_inf = (~usable).float()  # type: ignore[attr-defined]
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Moments and step counts by parameter index; moments are sharded as the parameters are."""
        return {
            f"{index}.{name}": value
            for index, parameter in enumerate(self.parameters)
            for name, value in self._adamw.state.get(parameter, {}).items()
        }

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what ``state_tensors`` gave, bit for bit, as whole tensors."""
        for key, value in tensors.items():
            index, name = key.split(".", 1)
            parameter = self.parameters[int(index)]
            self._adamw.state[parameter][name] = part_like(value, parameter)
