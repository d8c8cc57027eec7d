"""The environment of everything that runs in a venv: explicit, never inherited."""

from __future__ import annotations

import os
import pwd
import re
from typing import Dict, Mapping, Optional, Tuple

from payload.agent.layout import Layout
from payload.errors import PayloadError

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# What runs differ by and a person who looks at one wants to see. Everything else is private: a name tells nothing of
# what its value holds.
_HARMLESS_NAME = re.compile(
    r"(?:NCCL|GLOO|TORCH|TORCHINDUCTOR|PYTORCH|OMP|MKL|TRITON)_[A-Z0-9_]+"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|TOKENIZERS_PARALLELISM"
    r"|HF_HOME|HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|PYTHONHASHSEED|LANG|LC_ALL|TZ"
)
_SECRET_WORD = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|(?:API_?|ACCESS_|PRIVATE_)KEY)(?:_|$)"
)
# Wider than what is redacted elsewhere: here a doubt makes a value private.
_MAYBE_CREDENTIALS = re.compile(r"://.*@", re.DOTALL)


def base_environment() -> Dict[str, str]:
    """PATH, HOME, LANG: what any program may rely on. The caller sets the first two for the agent itself."""
    home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    return {"PATH": os.environ.get("PATH") or _DEFAULT_PATH, "HOME": home, "LANG": "C.UTF-8"}


def venv_environment(layout: Layout, venv: str, release: str, cache: Optional[str]) -> Dict[str, str]:
    """The environment of a payload module or job.

    Both compile caches are set in any case: without them torch would compile into /tmp, or fail.
    """
    folder = layout.cache(cache) if cache else layout.uncached
    environment = base_environment()
    environment["PATH"] = f"{layout.venv(venv) / 'bin'}:{environment['PATH']}"
    environment.update(
        DFLASH_ROOT=str(layout.root),
        PYTHONNOUSERSITE="1",
        PYTHONPATH=str(layout.release(release)),
        PYTHONUNBUFFERED="1",
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
        VIRTUAL_ENV=str(layout.venv(venv)),
    )
    return environment


def checked_environment(environment: Mapping[str, object]) -> Dict[str, str]:
    """``environment`` as strings that exec(2) takes. Raises PayloadError of kind ``usage``."""
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not isinstance(value, str) or "\0" in value:
            raise PayloadError(f"{name!r} cannot be set in an environment", kind="usage")
    return {name: str(value) for name, value in environment.items()}


def split_private(environment: Mapping[str, str]) -> Tuple[Dict[str, str], Dict[str, str]]:
    """Part ``environment`` into (what anyone on the machine may read, what only the job may).

    A value is private unless its name is one of a few that are known to be harmless and the value holds no URL with
    credentials.
    """

    def is_harmless(name: str, value: str) -> bool:
        known = _HARMLESS_NAME.fullmatch(name) and not _SECRET_WORD.search(name)
        return bool(known) and not _MAYBE_CREDENTIALS.search(value)

    shown = {name: value for name, value in environment.items() if is_harmless(name, value)}
    return shown, {name: value for name, value in environment.items() if name not in shown}
