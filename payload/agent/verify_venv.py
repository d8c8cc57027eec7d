"""What a venv really holds, told by its own Python: ``<venv>/bin/python -I verify_venv.py``.

stdin: ``{"imports": ["transformers", ...]}``. stdout: one JSON object with ``python``, ``torch`` (``version``,
``cuda``, ``git``; null when it cannot be imported), ``packages`` (name -> version) and ``failures`` (module ->
why its import failed).
"""

import importlib
import json
import os
import platform
import sys
from importlib import metadata


def main() -> None:
    """Import what is asked for and describe it."""
    # Libraries print while they are imported: their lines go to stderr.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    failures = {}
    for name in ["torch", *json.load(sys.stdin)["imports"]]:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - whatever an import raises, it is the finding
            failures[name] = f"{type(error).__name__}: {error}"
    torch = sys.modules.get("torch") if "torch" not in failures else None
    description = {
        "python": platform.python_version(),
        "torch": None
        if torch is None
        else {
            "version": str(getattr(torch, "__version__", "")),
            "cuda": getattr(getattr(torch, "version", None), "cuda", None),
            "git": getattr(getattr(torch, "version", None), "git_version", None),
        },
        "packages": {
            distribution.metadata["Name"]: distribution.version for distribution in metadata.distributions()
        },
        "failures": failures,
    }
    answer.write(json.dumps(description))
    answer.flush()


if __name__ == "__main__":
    main()
