"""What the facts of a container mean for a run: pure functions from what was seen to findings.

Nothing is asked of a container here, and whatever one answered is taken for data: a value of a wrong kind counts as
one that is not known.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.checks import gpus, inputs, machine
from orchestrator.checks.model import SEVERITIES, Finding, Needs, Seen, Severity, needs_of

__all__ = ["Finding", "Needs", "Seen", "Severity", "judge", "needs_of", "worst"]


def judge(seen: Seen, needs: Needs) -> list[Finding]:
    """Every check's finding, in the order in which a person would look: the container, its GPUs, what the run reads."""
    checks = (*machine.CHECKS, *gpus.CHECKS, *inputs.CHECKS)
    return [finding for check in checks for finding in check(seen, needs)]


def worst(findings: Iterable[Finding]) -> Severity:
    """The gravest severity among ``findings``."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default="ok")
