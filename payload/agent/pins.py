"""What a venv is asked to be, what it is called for that, and whether it is that."""

from __future__ import annotations

import hashlib
import json
import re
import sysconfig
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Mapping, Optional

from payload.agent.redaction import redact
from payload.errors import PayloadError

_BUILD = re.compile(r"cpu|cu\d{2,3}|rocm[\d.]+|xpu")


@dataclass(frozen=True)
class TorchPin:
    """The one build of torch that will do. None means: not pinned, except that a CPU build has no CUDA.

    ``version`` may have a local part (``2.11.0+cu128``); ``backend`` is uv's name of a build (``cu128``, ``cpu``);
    ``index_url`` is the only index that torch may come from; ``cuda`` and ``git`` are torch.version's.
    """

    version: str
    backend: Optional[str] = None
    index_url: Optional[str] = None
    cuda: Optional[str] = None
    git: Optional[str] = None

    @classmethod
    def from_request(cls, fields: Mapping[str, Any]) -> TorchPin:
        """Raises PayloadError of kind ``usage``."""
        known = {name: fields.get(name) for name in ("version", "backend", "index_url", "cuda", "git")}
        wrong = [name for name, value in known.items() if value is not None and not isinstance(value, str)]
        version = known["version"]
        if wrong or not version or not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", version):
            raise PayloadError(f"the torch pin cannot be used: {redact(str(dict(fields)))}", kind="usage")
        if known["backend"] is not None and not _BUILD.fullmatch(known["backend"]):
            raise PayloadError(
                f"{known['backend']!r} is not a build of torch", "cpu, cu128, ...", kind="usage"
            )
        return cls(**known)  # type: ignore[arg-type]

    def public(self) -> Dict[str, Optional[str]]:
        """The pin as it may be stored: its index without credentials."""
        return {**asdict(self), "index_url": None if self.index_url is None else redact(self.index_url)}

    @property
    def build(self) -> Optional[str]:
        """The build that is asked for (``cu128``, ``cpu``): by the local part, the backend or the index's name."""
        local = self.version.partition("+")[2]
        last = (self.index_url or "").rstrip("/").rpartition("/")[2]
        for name in (local, self.backend or "", last):
            if _BUILD.fullmatch(name):
                return name
        return None

    def mismatches(self, found: Mapping[str, Optional[str]]) -> List[str]:
        """What of torch's ``version``, ``cuda`` and ``git`` is not as pinned, in words; empty when all is."""
        wrong = []
        version = found.get("version") or ""
        compared = version if "+" in self.version else version.partition("+")[0]
        if compared != self.version:
            wrong.append(f"version: pinned {self.version}, found {version}")
        cuda = found.get("cuda")
        if self.cuda is not None:
            if cuda != self.cuda:
                wrong.append(f"CUDA: pinned {self.cuda}, found {cuda or 'none'}")
        elif self.build == "cpu" and cuda is not None:
            wrong.append(f"CUDA: pinned a CPU build, found {cuda}")
        elif self.build and self.build.startswith("cu") and cuda != _cuda_of(self.build):
            wrong.append(f"CUDA: pinned {_cuda_of(self.build)} ({self.build}), found {cuda or 'none'}")
        git = found.get("git") or ""
        # A pin may be the abbreviated commit that people write down.
        if self.git is not None and not (git and git.startswith(self.git)):
            wrong.append(f"git commit: pinned {self.git}, found {git or 'none'}")
        return wrong


def _cuda_of(build: str) -> str:
    """``cu128`` -> ``12.8``."""
    digits = build[2:]
    return f"{digits[:-1]}.{digits[-1]}"


def requirement_lines(text: str) -> List[str]:
    """The lines of a lock that say something, without comments, sorted. Raises PayloadError for options."""
    lines = []
    for line in text.splitlines():
        stripped = re.sub(r"(^|\s)#.*", "", line).strip()
        if stripped.startswith("-"):
            raise PayloadError(
                f"the requirements hold an option: {redact(stripped)!r}", "Only pins belong there.", "usage"
            )
        if stripped:
            lines.append(stripped)
    return sorted(lines)


def venv_name(requirements: List[str], torch: TorchPin, python_version: str) -> str:
    """The venv's name: 16 hexadecimal digits of the SHA-256 over all that decides what is in it.

    The credentials of an index or a requirement's URL do not: a new password is no new venv.
    """
    decided = {
        "requirements": [redact(line) for line in requirements],
        "torch": torch.public(),
        "python": python_version,
        "platform": sysconfig.get_platform(),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode("ascii")).hexdigest()[:16]


def check(description: Mapping[str, Any], torch: TorchPin) -> Dict[str, Any]:
    """``description`` (of verify_venv.py) when it is as pinned. Raises PayloadError of kind ``refused``."""
    failures: Mapping[str, str] = description["failures"]
    wrong = [f"import of {name} fails: {why}" for name, why in failures.items()]
    if description["torch"] is not None:
        wrong += [f"torch's {mismatch}" for mismatch in torch.mismatches(description["torch"])]
    if wrong:
        raise PayloadError(
            "the venv that was built is not the one that is pinned: " + "; ".join(wrong),
            "The venv in use is untouched. Correct the torch pin or its index in the inventory.",
            kind="refused",
        )
    return dict(description)
