"""Seeds of random numbers that depend on several things."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def seed_of(*parts: Any) -> int:
    """A seed of 32 bits, another one wherever any of ``parts`` (what JSON holds) is another.

    torch's generator on a CPU looks at no more bits than that: of a sum like ``seed << 32``, it would see nothing.
    """
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:4], "big")
