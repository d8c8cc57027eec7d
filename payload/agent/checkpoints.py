"""Which checkpoints of a run are whole, as far as their names and manifests tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import List

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,18})")


def whole_checkpoints(run_dir: Path) -> List[int]:
    """The steps whose checkpoint has its manifest, which is written last and removed first, in order."""
    steps = []
    for manifest in (run_dir / CHECKPOINTS).glob(f"*/{MANIFEST}"):
        match = _STEP.fullmatch(manifest.parent.name)
        if match and manifest.is_file() and not manifest.is_symlink():
            steps.append(int(match.group(1)))
    return sorted(steps)
