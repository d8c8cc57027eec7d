"""``cache list|show|verify|prune`` in a container: ``python -m payload.compile.manage`` answers one request.

Fields: ``action`` (list, show, verify, prune), ``fingerprint`` (show and verify), ``apply`` (prune; without it prune
only tells). No torch is imported.
"""

from __future__ import annotations

import sys
from typing import Any

from payload.agent.protocol import Events, Request, serve
from payload.compile.cache import CacheDir, cache_dir, cache_dirs, describe, prune, verify
from payload.errors import PayloadError


def manage(request: Request, events: Events) -> dict[str, Any]:
    """Handle one request. Raises PayloadError for an unknown action or cache."""
    action = request.need("action", str)
    if action == "list":
        return {"caches": [describe(request.root, cache) for cache in cache_dirs(request.root)]}
    if action == "show":
        return describe(request.root, _existing(request))
    if action == "verify":
        wrong = verify(_existing(request))
        return {"fingerprint": request.need("fingerprint", str), "whole": not wrong, "wrong": wrong}
    if action == "prune":
        return prune(request.root, bool(request.get("apply", bool)), request.get("holder", str) or "")
    raise PayloadError(f"there is no action {action!r}", "Use list, show, verify or prune.", kind="usage")


def _existing(request: Request) -> CacheDir:
    cache = cache_dir(request.root, request.need("fingerprint", str))
    if not cache.path.is_dir():
        known = ", ".join(each.fingerprint for each in cache_dirs(request.root)) or "none"
        raise PayloadError(
            f"there is no compile cache {cache.fingerprint} under {request.root}",
            f"Known: {known}.",
            kind="usage",
        )
    return cache


if __name__ == "__main__":
    sys.exit(serve(manage))
