"""The list of faults is the tests', and the tests' is the list."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
FAULTS = ("test_link.py", "test_job.py", "test_files.py", "test_security.py")


def test_every_fault_in_the_readme_has_its_test_and_every_test_of_a_fault_is_there() -> None:
    listed = re.findall(r"`(test_\w+)` \|", (FOLDER / "README.md").read_text())
    there = [
        name for file in FAULTS for name in re.findall(r"^def (test_\w+)", (FOLDER / file).read_text(), re.M)
    ]
    assert sorted(listed) == sorted(there)
