"""What the machine is, as facts that a plan can be made from without owning it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from lowprec.errors import UnsupportedError


@dataclass(frozen=True)
class Hardware:
    """Name, device type and CUDA compute capability (None on a CPU)."""

    name: str
    device: Literal["cpu", "cuda"]
    capability: tuple[int, int] | None

    def __str__(self) -> str:
        if self.capability is None:
            return self.name
        return f"{self.name} (sm{self.capability[0]}{self.capability[1]})"


NAMED: Final = MappingProxyType(
    {
        "cpu": Hardware("cpu", "cpu", None),
        "a100": Hardware("a100", "cuda", (8, 0)),
        "h100": Hardware("h100", "cuda", (9, 0)),
        "h200": Hardware("h200", "cuda", (9, 0)),
        "b200": Hardware("b200", "cuda", (10, 0)),
        "b300": Hardware("b300", "cuda", (10, 3)),
    }
)


def named(name: str) -> Hardware:
    """Facts of a machine by name; raises UnsupportedError with the known names."""
    if name not in NAMED:
        close = difflib.get_close_matches(name, NAMED, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(NAMED)}"
        raise UnsupportedError(f"unknown hardware {name!r}; {hint}")
    return NAMED[name]


def current() -> Hardware:
    """Facts of the machine that runs this process; asks CUDA only when this is called."""
    import torch

    if not torch.cuda.is_available():
        return NAMED["cpu"]
    name = short_name(torch.cuda.get_device_name())
    return Hardware(name, "cuda", torch.cuda.get_device_capability())


def short_name(device_name: str) -> str:
    """Return the known name of a GPU, else all words of what its driver calls it, with dashes."""
    words = re.findall(r"[a-z0-9]+(?:\.[a-z0-9]+)*", device_name.lower())
    if words[:1] == ["nvidia"]:
        del words[0]
    if not words:
        return "unknown-gpu"
    known = NAMED.get(words[0])
    return known.name if known and known.device == "cuda" else "-".join(words)
