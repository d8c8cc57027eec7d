"""What torch's compiler did so far in this process, from its own counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CompileCounts:
    """Totals since the process began.

    ``hits`` and ``misses`` count graphs found and not found in the FX graph cache, each forward and backward graph
    by itself; ``bypassed`` are graphs that could not be cached at all. ``retraced`` counts forward passes, each with
    its backward pass, that were traced although their compiled graphs may have been found. ``compilations`` counts
    frames that dynamo compiled, and ``recompiles`` those of them that had been compiled before, for other inputs.
    """

    hits: int
    misses: int
    bypassed: int
    retraced: int
    compilations: int
    recompiles: int

    def since(self, earlier: CompileCounts) -> CompileCounts:
        """The difference to an earlier reading."""
        before = asdict(earlier)
        return CompileCounts(**{name: count - before[name] for name, count in asdict(self).items()})


def read_counts() -> CompileCounts:
    """Read the counters now."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    inductor: Any = counters["inductor"]
    autograd: Any = counters["aot_autograd"]
    per_frame = [int(count) for count in FRAME_COMPILE_COUNTER.values()]
    return CompileCounts(
        hits=int(inductor["fxgraph_cache_hit"]),
        misses=int(inductor["fxgraph_cache_miss"]),
        bypassed=int(inductor["fxgraph_cache_bypass"]),
        retraced=int(autograd["autograd_cache_miss"] + autograd["autograd_cache_bypass"]),
        compilations=sum(per_frame),
        recompiles=sum(count - 1 for count in per_frame),
    )
