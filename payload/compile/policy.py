"""Whether training compiles on a device, and the reason, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from payload.compile.fingerprint import find_compiler, triton_version
from payload.errors import PayloadError

CompileMode = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Decision:
    """Whether to compile, and why (or why not), as a sentence for a person."""

    compiled: bool
    reason: str


def decide(mode: CompileMode, device: str) -> Decision:
    """Whether a recipe with ``compile: mode`` compiles on ``device`` (``cuda`` or ``cpu``).

    On a GPU something always is: ``off`` leaves attention alone compiled, which has no other affordable form there.
    On a CPU, ``auto`` compiles where a C++ compiler is installed. Raises PayloadError when what must compile cannot.
    """
    if device == "cuda":
        if not triton_version():
            raise PayloadError(
                "this torch sees a GPU, but Triton, which compiles its kernels, is not installed",
                "Build the venv again from the torch build's own index: it brings the Triton that fits.",
            )
        extent = "attention only (the recipe says compile: off), by " if mode == "off" else "by "
        return Decision(True, f"{extent}Triton {triton_version()}")
    if mode == "off":
        return Decision(False, "the recipe says compile: off")
    compiler = find_compiler()
    if compiler is not None:
        return Decision(True, f"by the C++ compiler {compiler}")
    if mode == "on":
        raise PayloadError(
            "the recipe says compile: on, but no C++ compiler is installed",
            "Install g++ in the container, or set compile: auto.",
            kind="refused",
        )
    return Decision(False, "no C++ compiler is installed; training on this CPU runs uncompiled")
