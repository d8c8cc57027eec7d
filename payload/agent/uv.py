"""uv's command lines and settings. All that this project knows of uv is here."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple
from urllib.parse import quote

from payload.agent.child import Outcome, run_child
from payload.agent.environment import base_environment
from payload.agent.layout import Layout
from payload.agent.pins import TorchPin
from payload.agent.redaction import redact
from payload.errors import PayloadError

# The CUDA wheels are hundreds of megabytes each; uv's own 30 s are too short for them.
_DEFAULT_HTTP_TIMEOUT_S = 300
_SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True)
class Sources:
    """Where packages come from, as the inventory or the desk's pip settings say."""

    index_url: Optional[str] = None
    extra_index_urls: Tuple[str, ...] = ()
    find_links: Tuple[str, ...] = ()
    certificate: Optional[str] = None
    http_proxy: Optional[str] = None
    https_proxy: Optional[str] = None
    no_proxy: Optional[str] = None
    timeout_s: int = _DEFAULT_HTTP_TIMEOUT_S
    offline: bool = False
    wheelhouse: Optional[str] = None

    @classmethod
    def from_request(cls, index: Mapping[str, Any], wheelhouse: Optional[str]) -> Sources:
        """Raises PayloadError of kind ``usage``."""

        def text(name: str) -> Optional[str]:
            value = index.get(name)
            if value is not None and not isinstance(value, str):
                raise PayloadError(f"the index setting {name} is not a string", kind="usage")
            return value or None

        def texts(name: str) -> Tuple[str, ...]:
            value = index.get(name) or []
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise PayloadError(f"the index setting {name} is not a list of strings", kind="usage")
            return tuple(value)

        timeout_s = index.get("timeout_s") or _DEFAULT_HTTP_TIMEOUT_S
        if not isinstance(timeout_s, (int, float)):
            raise PayloadError("the index setting timeout_s is not a number", kind="usage")
        extra_index_urls = texts("extra_index_urls")
        # uv takes several of them as one string, parted by spaces.
        if any(re.search(r"\s", url) for url in extra_index_urls):
            raise PayloadError("the index setting extra_index_urls is not a list of URLs", kind="usage")
        return cls(
            text("index_url"),
            extra_index_urls,
            texts("find_links"),
            text("certificate"),
            text("http_proxy"),
            text("https_proxy"),
            text("no_proxy"),
            max(1, int(timeout_s)),
            bool(index.get("offline")),
            wheelhouse,
        )


@dataclass(frozen=True)
class Uv:
    """uv at ``program``, with its cache under the root and nothing read from the container's own settings."""

    program: str
    layout: Layout
    sources: Sources
    python_downloads: bool = False

    def find_python(self, wanted: str) -> str:
        """The path of the interpreter that ``wanted`` (a path, a name or a version) means.

        uv is asked only for what is not on PATH. Raises PayloadError when there is none.
        """
        for name in (wanted, f"python{wanted}"):
            path = shutil.which(name)
            if path is not None:
                return path
        if not self.program:
            raise PayloadError(f"there is no Python {wanted!r} in the container")
        found: List[str] = []
        outcome = run_child(
            [self.program, "python", "find", "--no-config", "--no-project", "--system", wanted],
            environment=self._environment(),
            folder=self.layout.root,
            on_stdout=lambda line: found.append(line.decode("utf-8", "replace").strip()),
            on_stderr=lambda line: None,
            timeout_s=120.0,
        )
        self._close_locks()
        if outcome.returncode != 0 or not found:
            raise PayloadError(
                f"there is no Python {wanted!r} in the container: {' '.join(outcome.stderr_tail)}",
                "Install it there (Debian: python3), or name another one in the inventory.",
            )
        return found[-1]

    def create_venv(self, python: str, folder: Path, report: Callable[[str], None]) -> None:
        """An empty venv that still works when its folder is renamed."""
        argv = [self.program, "venv", "--no-config", "--no-project", "--relocatable", "--python", python]
        self._run([*argv, str(folder)], self._environment(), report, "the venv cannot be made")

    def install_torch_from_its_index(self, venv: Path, pin: TorchPin, report: Callable[[str], None]) -> None:
        """torch alone, without its dependencies, with no other index in sight."""
        environment = self._environment()
        environment["UV_DEFAULT_INDEX"] = pin.index_url or ""
        argv = [*self._install(venv), "--no-deps", _requirement(pin)]
        self._run(argv, environment, report, f"torch {pin.version} cannot be installed from its index")

    def install(
        self,
        venv: Path,
        requirements: Path,
        torch: str,
        backend: Optional[str],
        report: Callable[[str], None],
    ) -> None:
        """The lock and ``torch`` (a requirement), resolved as one."""
        argv = [*self._install(venv), "--requirements", str(requirements), torch]
        environment = self._environment()
        if self.sources.wheelhouse is not None or self.sources.offline:
            argv += ["--offline", "--no-index"]
        else:
            environment.update(self._indexes())
            if backend is not None:
                argv += ["--torch-backend", backend]
            if self.sources.extra_index_urls:
                # As pip does: the best of all indexes. What may come from one index only is pinned elsewhere.
                argv += ["--index-strategy", "unsafe-best-match"]
        places = self.sources.find_links if self.sources.wheelhouse is None else (self.sources.wheelhouse,)
        if places:
            # In the environment, not in argv: a URL may hold a password, and every user can read argv.
            environment["UV_FIND_LINKS"] = ",".join(self._find_links_url(place) for place in places)
        self._run(argv, environment, report, "the packages cannot be installed")

    def _install(self, venv: Path) -> List[str]:
        return [self.program, "pip", "install", "--no-config", "--python", str(venv / "bin" / "python")]

    def _find_links_url(self, place: str) -> str:
        """``place`` (a URL, or a path that may be relative to the root) as a URL without a comma.

        uv parts UV_FIND_LINKS at commas, and does not read it at all beside a ``--find-links`` in argv.
        """
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place):
            return re.sub(r"[,\s]", lambda found: quote(found.group()), place)
        return (self.layout.root / place).as_uri()

    def _indexes(self) -> Dict[str, str]:
        # In the environment, like UV_FIND_LINKS.
        found = {}
        if self.sources.index_url:
            found["UV_DEFAULT_INDEX"] = self.sources.index_url
        if self.sources.extra_index_urls:
            found["UV_INDEX"] = " ".join(self.sources.extra_index_urls)
        return found

    def _environment(self) -> Dict[str, str]:
        environment = base_environment()
        environment.update(
            UV_CACHE_DIR=str(self.layout.uv_cache),
            UV_HTTP_TIMEOUT=str(self.sources.timeout_s),
            UV_PYTHON_DOWNLOADS="automatic" if self.python_downloads else "never",
            UV_PYTHON_INSTALL_DIR=str(self.layout.python),
            NO_COLOR="1",
        )
        settings = {
            "SSL_CERT_FILE": self.sources.certificate or _system_certificates(),
            "HTTP_PROXY": self.sources.http_proxy,
            "HTTPS_PROXY": self.sources.https_proxy,
            "NO_PROXY": self.sources.no_proxy,
        }
        environment.update({name: value for name, value in settings.items() if value})
        if not _same_filesystem(self.layout.uv_cache, self.layout.venvs):
            environment["UV_LINK_MODE"] = "copy"
        return environment

    def _run(
        self, argv: List[str], environment: Mapping[str, str], report: Callable[[str], None], problem: str
    ) -> None:
        def show(line: bytes) -> None:
            text = line.decode("utf-8", "replace").rstrip()
            if text:
                report(redact(text))

        outcome = run_child(
            argv,
            environment=environment,
            folder=self.layout.root,
            on_stdout=show,
            on_stderr=show,
            timeout_s=None,
        )
        self._close_locks()
        if outcome.returncode != 0:
            raise _failure(problem, outcome)

    def _close_locks(self) -> None:
        """Take from others the right to write uv's lock files, which it gives them whatever the umask is."""
        locks = [*self.layout.venvs.glob("*/.lock"), *self.layout.python.glob(".lock")]
        for folder, folders, names in os.walk(self.layout.uv_cache):
            # The unpacked packages: many files, no locks.
            folders[:] = [name for name in folders if not name.startswith("archive-")]
            locks += [Path(folder, name) for name in names if name.endswith(".lock")]
        for lock in locks:
            # Another agent's uv may remove its own meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if lock.stat().st_mode & 0o022:
                    lock.chmod(0o644)


def _requirement(pin: TorchPin) -> str:
    return f"torch=={pin.version}"


def _system_certificates() -> Optional[str]:
    """The container's own bundle, which knows the company's proxy; without one uv uses the bundle it brings."""
    return str(_SYSTEM_CERTIFICATES) if _SYSTEM_CERTIFICATES.is_file() else None


def _same_filesystem(first: Path, second: Path) -> bool:
    first.mkdir(parents=True, exist_ok=True)
    second.mkdir(parents=True, exist_ok=True)
    return first.stat().st_dev == second.stat().st_dev


def _failure(problem: str, outcome: Outcome) -> PayloadError:
    said = redact("\n".join(outcome.stderr_tail))
    if "os error 28" in said or "No space left" in said:
        return PayloadError(f"{problem}: the container's disk is full", "Free some space, then try again.")
    if outcome.returncode < 0:
        said += f"\nuv was ended by signal {-outcome.returncode}"
    return PayloadError(
        f"{problem}: uv says\n{said}",
        "The venv in use is untouched. Look at the index settings and pins in the inventory.",
    )
