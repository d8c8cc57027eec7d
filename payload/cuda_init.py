"""Whether CUDA starts in this venv and computes on every GPU that is visible: what nvidia-smi cannot tell.

``python -m payload.cuda_init`` answers one request of the agent's protocol (no fields) with :func:`cuda_init`'s dict.
"""

from __future__ import annotations

import sys
from typing import Any

from payload.agent.protocol import Events, Request, serve

_SIDE = 64


def cuda_init() -> dict[str, Any]:
    """``available``, ``error`` (why CUDA does not start, else null), ``cuda`` and ``devices``, as plain JSON data.

    Each device has ``index``, ``name``, ``capability`` and ``error`` (why it did not compute, else null).
    """
    found: dict[str, Any] = {"available": False, "error": None, "cuda": None, "devices": []}
    try:
        import torch

        found["cuda"] = torch.version.cuda
        if torch.version.cuda is None:
            return {**found, "error": f"torch {torch.__version__} is a build without CUDA"}
        # is_available() only counts GPUs and hides the reason; init() raises it.
        torch.cuda.init()
        found["available"] = torch.cuda.is_available()
        count = torch.cuda.device_count()
    except Exception as error:  # noqa: BLE001 - whatever keeps CUDA from starting is the finding
        return {**found, "error": f"{type(error).__name__}: {error}"}
    return {**found, "devices": [_device(index) for index in range(count)]}


def _device(index: int) -> dict[str, Any]:
    """One GPU, after a product of two matrices on it."""
    import torch

    found: dict[str, Any] = {"index": index, "name": None, "capability": None, "error": None}
    try:
        properties = torch.cuda.get_device_properties(index)
        found.update(name=properties.name, capability=f"sm_{properties.major}{properties.minor}")
        ones = torch.ones(_SIDE, _SIDE, device=f"cuda:{index}")
        if (ones @ ones).sum().item() != float(_SIDE**3):
            found["error"] = "a product of matrices of ones came out wrong"
    except Exception as error:  # noqa: BLE001 - one broken GPU must not hide the others
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def handle(request: Request, events: Events) -> dict[str, Any]:
    """The agent's way in."""
    return cuda_init()


if __name__ == "__main__":
    sys.exit(serve(handle))
