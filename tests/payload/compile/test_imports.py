"""What the compiler needs is imported ahead of the first step, and before what makes its imports slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from payload.recipe import load_recipe
from tests.payload.compile.builders import needs_compiler

REPO = Path(__file__).parents[3]
TOLD = """
import sys
from pathlib import Path
from payload.trainer import job

def told(*arguments):
    print([name in sys.modules for name in ("torch._inductor.compile_fx", "transformers")])
    return 0

job._train, job.require_warm = told, lambda *arguments: None
sys.exit(job.run_job(Path(sys.argv[1])))
"""


@needs_compiler
def test_a_job_that_compiles_has_the_compiler_imported_before_transformers(tmp_path: Path) -> None:
    recipe = load_recipe("tiny-cpu", {"compile": "on", "topology.targets": [0], "topology.drafters": [0]})
    (tmp_path / "spec.json").write_text(json.dumps({"recipe": recipe.to_dict()}))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TOLD, str(tmp_path / "spec.json")],
        env={**os.environ, **alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[True, False]"), done.stdout + done.stderr
