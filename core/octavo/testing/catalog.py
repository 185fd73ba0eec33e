"""Every check of the kit, in the order in which they run: from single ops to a served model.

Levels: 0 serves on the reference ops, 1 has attention and cache kernels of its own, 2 graphs, quantised weights, ranks.
"""

import unittest
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from octavo.contract import OPS
from octavo.testing import behaviour, claims, kernels, small_weights
from octavo.testing.bench import Bench
from octavo.testing.cases_attention import SPECS
from octavo.testing.cases_ops import DTYPES
from octavo.testing.outcome import NotOfferedError

__all__ = ["HIGHEST_LEVEL", "Check", "checks", "matching"]

HIGHEST_LEVEL = 2


@dataclass(frozen=True)
class Check:
    """One thing that is checked.

    Attributes:
        name: group/subject, or group/subject/variant; what expectations and reports go by.
        level: that it belongs to.
        says: what holds when it passes, in one clause.
        run: returns a remark, or raises CheckError or NotOfferedError; anything else that it raises is a failure too.

    """

    name: str
    level: int
    says: str
    run: Callable[[Bench], str]

    @property
    def group(self) -> str:
        """The first part of the name."""
        return self.name.partition("/")[0]

    def test(self, bench: Bench) -> None:
        """Run it as a test of pytest's; what is not offered is skipped."""
        try:
            self.run(bench)
        except NotOfferedError as error:
            raise unittest.SkipTest(str(error)) from None

    def __str__(self) -> str:
        return self.name


def checks(level: int = HIGHEST_LEVEL, patterns: Sequence[str] = ()) -> tuple[Check, ...]:
    """The checks up to a level whose names match one of the patterns (shell-like), or all of them."""
    return tuple(check for check in _ALL if check.level <= level and (not patterns or matching(check.name, patterns)))


def matching(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name is one of the patterns or lies in it ("ops" has "ops/linear/float32" in it)."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in patterns)


def _of_ops() -> list[Check]:
    return [
        Check(
            f"ops/{op}/{str(dtype).removeprefix('torch.')}",
            0,
            "each implementation equals the formula on all cases that it says it serves, and keeps its claims",
            lambda bench, op=op, dtype=dtype: kernels.op(bench, op, dtype),  # type: ignore[misc]
        )
        for op in OPS
        for dtype in (DTYPES[:1] if OPS[op].of_output else DTYPES)
    ]


def _of_attention() -> list[Check]:
    serving = "whatever serves this geometry equals dense attention, whole, in chunks, beside NaN and nonsense"
    own = "the platform's own kernels do, in each of its dtypes"
    return [
        *(
            Check(f"attention/{name}", 0, serving, lambda bench, name=name: kernels.serving_attention(bench, name))  # type: ignore[misc]
            for name in SPECS
        ),
        *(
            Check(f"kernels/{name}", 1, own, lambda bench, name=name: kernels.own_attention(bench, name))  # type: ignore[misc]
            for name in SPECS
        ),
    ]


_ALL: tuple[Check, ...] = (
    Check("platform/facts", 0, "what the platform says of itself is well formed and stays the same", claims.facts),
    Check("platform/memory", 0, "tensors come to the device and back, and memory is told in bytes", claims.memory),
    Check("platform/settings", 0, "settings that it prefers exist, and those given are left alone", claims.settings),
    Check("platform/attributes", 0, "an unknown attribute is an AttributeError", claims.attributes),
    Check(
        "platform/answers", 0, "every question whether a call is served gets a Support, never a raise", claims.answers
    ),
    Check("platform/probe", 0, "the limits that it measures are rates", claims.probe),
    Check("sampling/philox", 0, "the generator of draws gives Random123's known answers", claims.philox),
    *_of_ops(),
    *_of_attention(),
    Check("attention/empty", 0, "steps without rows, and rows without tokens", kernels.serving(kernels.empty)),
    Check("attention/slots", 0, "a token at slot -1 is written nowhere", kernels.serving(kernels.slots)),
    Check("attention/copies", 0, "blocks are copied whole", kernels.serving(kernels.copies)),
    Check("attention/swaps", 0, "blocks go to the host and come back whole", kernels.serving(kernels.swaps)),
    Check("kernels/empty", 1, "steps without rows, and rows without tokens", kernels.own(kernels.empty)),
    Check("kernels/slots", 1, "a token at slot -1 is written nowhere", kernels.own(kernels.slots)),
    Check("kernels/copies", 1, "blocks are copied whole", kernels.own(kernels.copies)),
    Check("kernels/swaps", 1, "blocks go to the host and come back whole", kernels.own(kernels.swaps)),
    Check("behaviour/greedy", 0, "a tiny model's tokens are those of float64", behaviour.greedy),
    Check("behaviour/rows", 0, "requests alone and in company have the same tokens", behaviour.rows),
    Check("behaviour/chunks", 0, "prompts in chunks give what whole ones do", behaviour.chunks),
    Check("behaviour/prefix-cache", 0, "a cached prefix gives what a computed one does", behaviour.prefix_cache),
    Check("behaviour/recompute", 0, "preempted requests go on by recomputing", behaviour.recompute),
    Check("behaviour/swap", 0, "preempted requests go on from host blocks", behaviour.swap),
    Check("behaviour/samples", 0, "samples share blocks until they part; a seed fixes them", behaviour.samples),
    Check("behaviour/copies", 0, "a step brings at most one copy to the host", behaviour.copies),
    Check("behaviour/memory", 0, "1,000 steps leave memory flat", behaviour.memory),
    Check("behaviour/spawned", 0, "a spawned process serves, with the same tokens", behaviour.spawned),
    Check("behaviour/costs", 0, "a compiled program tells bytes and dtypes of its products", behaviour.costs),
    Check("graphs/replay", 2, "a captured step equals an eager one", claims.graphs),
    Check(
        "weights/quantised",
        2,
        "products of quantised weights equal those of the weights dequantised",
        small_weights.quantised,
    ),
    Check("ranks/two", 2, "two ranks give the tokens of one", claims.ranks),
)
