"""One benchmark from start to end: engines loaded, variants run in turn, limits probed between them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tqdm import tqdm

from octavo.cli.bench.measure import Batching, Run, run_workload, touched_blocks
from octavo.cli.bench.memory import resident_bytes
from octavo.cli.bench.recorder import Recorder, Step
from octavo.cli.bench.roofline import Limit, ModelCosts, Work, limit_of, model_costs, work_of
from octavo.cli.bench.workload import Shape, make_requests
from octavo.config import EngineConfig
from octavo.contract import Probe
from octavo.engine.llm import LLM
from octavo.engine.terminal import progress_wanted
from octavo.sampling_params import SamplingParams

__all__ = ["Engine", "Result", "Session", "Variant"]


@dataclass(frozen=True)
class Variant:
    """One way to serve the workload.

    Attributes:
        name: in the report.
        settings: of the engine, changed from those given.
        batching: how requests are handed over.
        temperature, top_p: greedy at 0.

    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    batching: Batching = "continuous"
    temperature: float = 0.0
    top_p: float = 1.0


class Engine:
    """A loaded model whose steps are recorded."""

    def __init__(self, config: EngineConfig) -> None:
        self.llm = LLM(config=config)
        self.recorder: Recorder
        self.llm.wrap_executor(self._record)
        self.touched: set[int] = set()

    def _record(self, inner: Any) -> Recorder:
        self.recorder = Recorder(inner)
        return self.recorder

    @property
    def block_size(self) -> int:
        """Tokens a KV block."""
        return self.recorder.memory_plan.block_size

    @cached_property
    def costs(self) -> ModelCosts:
        """Of the model's steps."""
        dtype: torch.dtype = getattr(torch, self.llm.config.model.dtype)
        return model_costs(self.llm.description, self.recorder, dtype)

    def probe(self) -> Probe | None:
        """The device's limits now, at the bytes that a step of one token reads."""
        return self.recorder.probe(self.costs.program.layer_bytes + self.costs.program.head_bytes)

    def run(self, shape: Shape, repeat: int, variant: Variant) -> Run:
        """Serve the workload once."""
        description = self.llm.description
        vocab_size = min(self.llm.tokenizer.vocab_size, description.vocab_size)
        requests = make_requests(shape, repeat, vocab_size, list(description.eos_token_ids))
        params = SamplingParams(temperature=variant.temperature, top_p=variant.top_p)
        run = run_workload(
            self.llm, self.recorder, requests, params, variant.batching, self.llm.config.scheduler.max_num_seqs
        )
        self.touched |= touched_blocks(run.steps)
        return run

    def other_resident_bytes(self) -> int | None:
        """Resident memory of this process beyond the KV blocks that were ever held; None where nobody tells."""
        resident = resident_bytes()
        return None if resident is None else resident - len(self.touched) * self.recorder.memory_plan.block_bytes


@dataclass
class Result:
    """What a variant's repeats gave, the first ones for warm-up left out."""

    variant: Variant
    engine: Engine
    runs: list[Run] = field(default_factory=list)
    probes: list[Probe] = field(default_factory=list)  # one before each run, where the platform measures

    @property
    def probe(self) -> Probe | None:
        """The median of each limit."""
        if not self.probes:
            return None
        peaks = {
            dtype: statistics.median(probe.ops_per_second[dtype] for probe in self.probes)
            for dtype in self.probes[0].ops_per_second
        }
        return Probe(statistics.median(probe.read_bytes_per_second for probe in self.probes), peaks)

    def median(self, figure: Callable[[Run], float]) -> float:
        """Of the repeats."""
        return statistics.median(map(figure, self.runs))

    def works(self, steps: Sequence[Step]) -> list[Work]:
        """What each step asks of the device."""
        return [work_of(step, self.engine.costs) for step in steps]

    def limit(self, steps: Sequence[Step]) -> Limit | None:
        """The least time for the steps; None where the platform measures no limits."""
        return None if self.probe is None else limit_of(self.works(steps), self.engine.costs, self.probe)


class Session:
    """Engines for some variants, which share one where their settings are the same. Use as a context manager."""

    def __init__(self, config: EngineConfig, variants: Sequence[Variant]) -> None:
        self._exit = ExitStack()
        self._engines: dict[str, Engine] = {}
        self.results: list[Result] = []
        with ExitStack() as undo:
            undo.push(self._exit)
            for variant in variants:
                key = repr(sorted(variant.settings.items()))
                if key not in self._engines:
                    self._engines[key] = engine = Engine(config.but(**variant.settings))
                    self._exit.callback(engine.llm.close)
                self.results.append(Result(variant, self._engines[key]))
            undo.pop_all()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    @property
    def engines(self) -> list[Engine]:
        """Each once."""
        return list(self._engines.values())

    def measure(self, shape: Shape, *, warmup: int, repeats: int) -> list[Result]:
        """Run the variants in turn, every other time in the other order; the first `warmup` turns do not count."""
        with tqdm(total=(warmup + repeats) * len(self.results), unit="run", disable=not progress_wanted()) as bar:
            for turn in range(warmup + repeats):
                for result in self.results if turn % 2 == 0 else self.results[::-1]:
                    kind = "warm-up" if turn < warmup else f"repeat {turn - warmup + 1} of {repeats}"
                    bar.set_description(f"{result.variant.name}, {kind}")
                    probe = result.engine.probe() if turn >= warmup else None
                    run = result.engine.run(shape, turn, result.variant)
                    bar.update()
                    if turn >= warmup:
                        result.runs.append(run)
                        result.probes.extend([probe] if probe else [])
        return self.results
