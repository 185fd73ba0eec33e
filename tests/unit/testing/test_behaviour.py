"""Platforms whose ops and attention pass, and whose served model is wrong: the checks of behaviour see it."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from doubles.plugins import platform_source, write_distribution

from octavo.testing import Bench, CheckError, checks

MEMBERS = """
    def attention_backends(self):
        import torch
        from octavo.contract import Support
        from octavo.contract.reference_attention import ReferenceAttention
        class Own(ReferenceAttention):
            name = "own"
            BODY
        return [Own(self.device)]

    def ops(self):
        from octavo.contract import OpImpl, Support
        import torch.nn.functional as F
        def linear(args):
            rows = [F.linear(args.x[i : i + 1], args.weight, args.bias) for i in range(len(args.x))]
            return torch.cat(rows) if rows else F.linear(args.x, args.weight, args.bias)
        return [OpImpl("linear", "chip", "native", linear, row_invariant=Support.yes())]
"""
NOTHING = "api_version = (0, 9)"
NUMBERS = itertools.count()


@pytest.fixture
def bench_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Installs a platform whose attention is the reference but for `body`, and puts it on a bench."""
    made: list[Bench] = []

    def make(body: str, create: str = "lambda device: Toy()") -> Bench:
        name = f"chip{next(NUMBERS)}"  # modules stay imported
        source = platform_source(name, priority=-1).replace("    def diagnostics", f"{MEMBERS}\n    def diagnostics")
        source = source.replace("BODY", body).replace("lambda device: Toy()", create)
        write_distribution(tmp_path, f"vendor-{name}", {name: f"{name}_plugin"}, {f"{name}_plugin": source})
        monkeypatch.syspath_prepend(tmp_path)
        made.append(Bench(name))
        return made[-1]

    yield make
    for bench in made:
        bench.__exit__(None, None, None)


def failure_of(name: str, bench: Bench) -> str:
    (check,) = checks(patterns=[name])
    try:
        check.run(bench)
    except CheckError as error:
        return str(error)
    return ""


# The one line of a class body that goes wrong, and what is said of it.
FAULTS = {
    "behaviour/samples": ("def copy_blocks(self, cache, mapping): pass", "log-probability is off by"),
    "behaviour/swap": ("def swap_blocks(self, source, target, mapping): pass", "below the best logit"),
    "behaviour/greedy": (
        "def attend(self, plan, layer, query, out, sinks=None): super().attend(plan, 0, query, out, sinks)",
        "below the best logit",
    ),
    "behaviour/rows": (
        "def attend(self, plan, layer, query, out, sinks=None):"
        " super().attend(plan, layer, query, out, sinks); out.mul_(1 + 2**-20 * (len(plan.tiles) > 4))",
        "claims that rows do not depend on each other, and request",
    ),
    "behaviour/chunks": (
        "def attend(self, plan, layer, query, out, sinks=None):"
        " super().attend(plan, layer, query, out, sinks); out.mul_(1 + 2**-20 * (len(out) > 12))",
        "differs in chunks",
    ),
    "behaviour/memory": (
        "def plan(self, cache, batch): self.kept = [*getattr(self, 'kept', []), torch.ones(1 << 17)];"
        " return super().plan(cache, batch)",
        "the process grew by",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_served_model_that_goes_wrong(name: str, bench_of: Callable[..., Bench]) -> None:
    body, said = FAULTS[name]
    assert said in failure_of(name, bench_of(body))


@pytest.mark.parametrize("name", FAULTS)
def test_the_same_platform_without_the_fault(name: str, bench_of: Callable[..., Bench]) -> None:
    assert failure_of(name, bench_of(NOTHING)) == ""


def test_a_platform_that_ends_spawned_processes(bench_of: Callable[..., Bench]) -> None:
    create = "lambda device: __import__('multiprocessing').parent_process() and __import__('os')._exit(9) or Toy()"
    assert failure_of("behaviour/spawned", bench_of(NOTHING, create)) == "the spawned process died"
