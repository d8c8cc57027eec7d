"""The compiler's own modules, imported ahead of the first step."""

from __future__ import annotations


def import_compiler() -> None:
    """Import what torch.compile would import in the middle of the first step: hundreds of modules, for seconds.

    To be called before transformers is imported: torch asks for the source line of every operator that these modules
    define, for which Python looks through all modules there are.
    """
    import torch._inductor.compile_fx  # noqa: F401
