"""A drafter whose weights and optimizer state lie in parts on several ranks (FSDP2)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from payload.drafter.model import DFlashDrafter


def shard(drafter: DFlashDrafter, group: dist.ProcessGroup, device: torch.device, compiled: bool) -> None:
    """Shard by FSDP2: layer by layer; as a whole when compiled, since its one graph holds nothing that gathers."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, device.type)
    for layer in drafter.layers if not compiled else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(drafter, mesh=mesh)
    if compiled:
        drafter.forward = torch.compile(drafter.forward, dynamic=False, fullgraph=True)  # type: ignore[method-assign]


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is, or gathered from its shards: then a collective of those that hold them.

    Who needs many of them takes one after the other: all at once are the memory that sharding saves.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor on the device of a parameter, and sharded as that is if it has its shape."""
    own = tensor.to(parameter.device)
    if isinstance(parameter, DTensor) and own.shape == parameter.shape:
        return distribute_tensor(own, parameter.device_mesh, parameter.placements)
    return own
