"""The environment of everything that runs in a venv: explicit, never inherited."""

from __future__ import annotations

import os
import pwd
import re
from typing import Dict, Mapping, Optional, Tuple

from payload.agent.layout import Layout
from payload.errors import PayloadError

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Whole words between underscores: HF_TOKEN is a secret, TOKENIZERS_PARALLELISM is none.
_SECRET_NAME = re.compile(
    r"(?:^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY(?:_ID)?|PRIVATE_KEY)(?:_|$)",
    re.IGNORECASE,
)


def base_environment() -> Dict[str, str]:
    """PATH, HOME, LANG: what any program may rely on. The caller sets the first two for the agent itself."""
    home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    return {"PATH": os.environ.get("PATH") or _DEFAULT_PATH, "HOME": home, "LANG": "C.UTF-8"}


def venv_environment(layout: Layout, venv: str, release: str, cache: Optional[str]) -> Dict[str, str]:
    """The environment of a payload module or job.

    Both compile caches are set in any case: without them torch would compile into /tmp, or fail.
    """
    folder = layout.cache(cache) if cache else layout.root / "uncached"
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


def split_secrets(environment: Mapping[str, str]) -> Tuple[Dict[str, str], Dict[str, str]]:
    """Part ``environment`` into (what may be shown, what looks like a secret by its name)."""
    secret = {name: value for name, value in environment.items() if _SECRET_NAME.search(name)}
    return {name: value for name, value in environment.items() if name not in secret}, secret
