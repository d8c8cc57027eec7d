"""What torch, flex_attention and dynamo really are in this venv, and how its compile caches stand.

``python -m payload.probe`` answers one request of the agent's protocol (no fields) with :func:`probe`'s dict.
"""

from __future__ import annotations

import inspect
import os
import platform
import sys
from importlib import metadata
from typing import Any

from payload.agent.protocol import Events, Request, serve
from payload.compile.cache import cache_dirs, describe
from payload.compile.fingerprint import compiler_version, find_compiler, triton_version
from payload.compile.fx_flag import FlagHome, inspect_flag

DYNAMO_LIMITS = (
    "recompile_limit",
    "accumulated_recompile_limit",
    "fail_on_recompile_limit_hit",
    "error_on_nested_fx_trace",
    "force_compile_during_fx_trace",
    "suppress_errors",
    "disable",
)
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
PACKAGES = ("torch", "triton", "transformers", "safetensors", "numpy")


def probe(root: str) -> dict[str, Any]:
    """Everything as plain JSON data; a section that cannot be read holds ``{"error": why}`` instead."""
    sections = {
        "python": _python,
        "packages": _packages,
        "torch": _torch,
        "fx_flag": _fx_flag,
        "flex_attention": _flex_attention,
        "dynamo": _dynamo,
        "compiler": _compiler,
        "cache": lambda: _cache(root),
        "devices": _devices,
    }
    return {name: _try(read) for name, read in sections.items()}


def _try(read: Any) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - a probe tells what it can of a broken venv
        return {"error": f"{type(error).__name__}: {error}"}


def _python() -> dict[str, Any]:
    return {"version": platform.python_version(), "executable": sys.executable}


def _packages() -> dict[str, str | None]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in PACKAGES}


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        # Two builds of one version number differ only here.
        "git": torch.version.git_version,
        "cudnn": torch.backends.cudnn.version(),
    }


def _fx_flag() -> dict[str, Any]:
    import torch.fx._symbolic_trace as symbolic_trace

    report = inspect_flag(symbolic_trace)
    return {
        "home": report.home.value,
        "reason": report.reason,
        # The guard always keeps a trace's patches of nn.Module from other threads; the flag too where it is global.
        "flag_is_guarded": report.home is FlagHome.GLOBAL,
        "guard_needed": True,
        "guard_fits": report.home is not FlagHome.UNKNOWN,
        "source": inspect.getsource(symbolic_trace.is_fx_symbolic_tracing),
    }


def _flex_attention() -> dict[str, Any]:
    import importlib

    module = importlib.import_module("torch.nn.attention.flex_attention")
    return {
        "signature": str(inspect.signature(module.flex_attention)),
        "compile_names": sorted(name for name in vars(module) if "compile" in name.lower()),
    }


def _dynamo() -> dict[str, Any]:
    import torch._dynamo.config as config

    # A name that this torch does not have is itself an answer: null.
    return {name: getattr(config, name, None) for name in DYNAMO_LIMITS}


def _compiler() -> dict[str, Any]:
    return {"cxx": find_compiler(), "cxx_version": compiler_version(), "triton": triton_version()}


def _cache(root: str) -> dict[str, Any]:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return {
        "environment": {name: os.environ.get(name) for name in CACHE_VARIABLES},
        "inductor_dir": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir(),
        "caches": [describe(root, cache) for cache in cache_dirs(root)],
    }


def _devices() -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"sm_{properties.major}{properties.minor}",
                "memory_bytes": properties.total_memory,
            }
        )
    return {
        "gpus": gpus,
        "cpu": {"capability": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()},
    }


def handle(request: Request, events: Events) -> dict[str, Any]:
    """The agent's way in."""
    return probe(request.root)


if __name__ == "__main__":
    sys.exit(serve(handle))
