"""One seed a named random stream, so that arms of a seed differ only where they should."""

from __future__ import annotations

import hashlib


def stream_seed(seed: int, stream: str) -> int:
    """A 63-bit seed for one named random stream of one run."""
    digest = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
