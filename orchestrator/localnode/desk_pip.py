"""Where the desk's pip takes packages from, for tools that do not read pip's settings.

uv reads neither ``PIP_*`` nor pip.conf, and the embedded node's containers share the desk's network: what pip needs
to reach an index, uv needs as well. Sources and precedence are pip's own (``pip/_internal/configuration.py`` and
``cli/parser.py``): files (global, user, environment's site, PIP_CONFIG_FILE), in each the section ``[install]`` over
``[global]``, and the environment over all files. pip itself may be missing, so its files are read here.

URLs may hold passwords: settings go to files that only the user can read, and no message here holds one.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.settings import IndexSettings, TorchPin

TORCH_VERSION = "2.13.0"
DEFAULT_TIMEOUT_S = 300
_RESOLVE_TIMEOUT_S = 60.0
_SYSTEM_FILE = Path("/etc/pip.conf")
_ALIASES = {"pypi-url": "index-url", "default-timeout": "timeout"}
_UV_COMPILE = ("pip", "compile", "-", "--quiet", "--no-config", "--no-cache", "--no-deps", "--offline")
_SECTIONS = ("global", "install")


def desk_index(
    environment: Mapping[str, str] | None = None, prefix: Path = Path(sys.prefix)
) -> IndexSettings:
    """The desk's settings, from ``environment`` (default: this process's) and the files that it and ``prefix``, a
    venv, lead to.

    A file that is missing, unreadable or malformed counts as empty: pip, not this, is where a person learns of it.
    """
    environment = os.environ if environment is None else environment
    settings = pip_settings(environment, prefix)
    proxy = settings.get("proxy") or None
    return IndexSettings(
        index_url=settings.get("index-url") or None,
        extra_index_urls=tuple(settings.get("extra-index-url", "").split()),
        find_links=tuple(
            _absolute_link(link, environment) for link in settings.get("find-links", "").split()
        ),
        certificate=_certificate(settings, environment),
        http_proxy=proxy or _either_case(environment, "http_proxy"),
        https_proxy=proxy or _either_case(environment, "https_proxy"),
        no_proxy=_either_case(environment, "no_proxy"),
        timeout_s=max(DEFAULT_TIMEOUT_S, _seconds(settings.get("timeout", ""))),
        offline=settings.get("no-index", "").lower() in ("1", "true", "yes", "on", "t", "y"),
    )


def desk_torch(
    environment: Mapping[str, str] | None = None,
    *,
    version: str = TORCH_VERSION,
    python: str = sys.executable,
) -> TorchPin:
    """The torch build that a machine without GPUs uses: the desk's own where it has one, else the CPU build's index."""
    at_hand = torch_is_at_hand(version, desk_index(environment), python=python)
    return TorchPin(version=version, backend=None if at_hand else "cpu")


def pip_settings(environment: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """pip's effective options by their long names, values as they are written (lists separated by whitespace)."""
    settings: dict[str, str] = {}
    for path in _configuration_files(environment, prefix):
        settings |= _read(path)
    for key, value in environment.items():
        if key.startswith("PIP_") and key != "PIP_CONFIG_FILE":
            name = key.removeprefix("PIP_").lower().replace("_", "-")
            settings[_ALIASES.get(name, name)] = value
    return settings


def _configuration_files(environment: Mapping[str, str], prefix: Path) -> Iterator[Path]:
    """pip's files, the least important first."""
    chosen = environment.get("PIP_CONFIG_FILE")
    if chosen == os.devnull:
        return
    for folder in environment.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"):
        if folder:
            yield Path(folder, "pip", "pip.conf")
    yield _SYSTEM_FILE
    if not (chosen and Path(chosen).exists()):
        home = _home(environment)
        yield home / ".pip" / "pip.conf"
        yield Path(environment.get("XDG_CONFIG_HOME", "") or home / ".config") / "pip" / "pip.conf"
    yield prefix / "pip.conf"
    if chosen:
        yield Path(chosen)


def _read(path: Path) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, configparser.Error):
        return {}
    found: dict[str, str] = {}
    for section in _SECTIONS:
        if parser.has_section(section):
            for key, value in parser.items(section):
                name = key.lower().replace("_", "-")
                found[_ALIASES.get(name, name)] = value
    return found


def _absolute_link(link: str, environment: Mapping[str, str]) -> str:
    """A local folder by its absolute path; a URL as it is."""
    if "://" in link:
        return link
    if link.startswith("~/"):
        return str(_home(environment) / link[2:])
    return str(Path(link).absolute())


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("HOME", "") or os.path.expanduser("~"))


def _certificate(settings: Mapping[str, str], environment: Mapping[str, str]) -> str | None:
    """pip's ``--cert``, else what its HTTP library takes from the environment."""
    candidates = [settings.get("cert")]
    candidates += [
        environment.get(name) for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    ]
    return next((path for path in candidates if path), None)


def _either_case(environment: Mapping[str, str], name: str) -> str | None:
    return environment.get(name) or environment.get(name.upper()) or None


def _seconds(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return 0


def torch_is_at_hand(version: str, index: IndexSettings, *, python: str) -> bool:
    """Whether ``torch==version`` for ``python`` is in the local find-links or in an index that is a local folder.

    uv is asked, without network: it alone knows which wheel fits which interpreter. False as well when uv cannot
    be asked. A build that is at hand is what the person at this desk put there, and needs no index of its own.
    """
    local_indexes = [
        url for url in (index.index_url, *index.extra_index_urls) if url and url.startswith("file://")
    ]
    local_links = [link for link in index.find_links if "://" not in link or link.startswith("file://")]
    sources = [argument for link in local_links for argument in ("--find-links", link)]
    if local_indexes:
        # The last one as uv's default index, so that none but these is asked.
        sources += [argument for url in local_indexes[:-1] for argument in ("--index", url)]
        sources += ["--default-index", local_indexes[-1], "--index-strategy", "unsafe-best-match"]
    else:
        sources += ["--no-index"]
    return bool(local_links or local_indexes) and _resolves(f"torch=={version}", sources, python)


def _resolves(requirement: str, sources: list[str], python: str) -> bool:
    import uv  # its wheel holds the binary; the package only finds it

    with tempfile.TemporaryDirectory() as folder:
        try:
            asked = subprocess.run(
                [uv.find_uv_bin(), *_UV_COMPILE, "--python", python, *sources],
                input=requirement.encode("utf-8"),
                capture_output=True,
                timeout=_RESOLVE_TIMEOUT_S,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder},
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
    return asked.returncode == 0
