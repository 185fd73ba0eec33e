"""What Python adds to a step of decoding: microseconds, with the program replaced by one that computes nothing.

python -m bench.python_step [--batch 1 8 32] [--sampled] [--steps 2000]          (in tests/, or with it on the path)

A whole step (schedule, build, submit, take, update) is timed without anything in between; its parts in a second
run, where the clock itself adds some tenths of a microsecond each. What follows a step at the front (token ids to
text, stop strings, outputs) is a line of its own. Medians, with the 10th and 90th percentile.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from octavo.config import EngineConfig
from octavo.contract import AttentionSpec, KVCache, RowMode, Rows, StepBatch, StepOutput, Support
from octavo.contract.reference_attention import ReferenceAttention
from octavo.engine.inputs import TokenizedPrompt
from octavo.engine.loop import EngineCore
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import OctavoError
from octavo.executor.base import Executor
from octavo.executor.memory import MemoryPlan
from octavo.executor.model_runner import KVGroupCaches, ModelRunner, RunnerLimits
from octavo.hardware.resolve import Manifest
from octavo.model.files import resolve_model
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import ModelRunnerOutput, RequestUpdate, SchedulerOutput
from octavo.scheduler.request import Request
from octavo.text.tokenizer import Tokenizer, load_tokenizer

VOCAB = 49_152
BLOCK_SIZE = 32
MAX_MODEL_LEN = 8192
NUM_WARM_UP = 64
NUM_KEPT = 200
CPU = torch.device("cpu")


class StubProgram:
    """Answers every row at once: ids that go round for GREEDY, one set of random rows for LOGITS."""

    modes = frozenset((RowMode.LOGITS, RowMode.GREEDY))
    row_invariant = Support.yes()

    def __init__(self, max_rows: int, scale: float = 4.0) -> None:
        rng = np.random.default_rng(0)
        self._ids = rng.integers(1000, 20_000, max_rows)
        self._logits = torch.from_numpy((rng.standard_normal((max_rows, VOCAB)) * scale).astype(np.float32))
        self._output = StepOutput()

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        return 0

    def bind(self, kv_caches: object) -> None:
        pass

    def submit(self, batch: StepBatch, rows: Rows) -> "StubProgram":
        num_greedy = int(np.count_nonzero(rows.mode == RowMode.GREEDY))
        num_logits = len(rows.mode) - num_greedy
        self._output = StepOutput(self._logits[:num_logits], self._ids[:num_greedy])
        return self

    def result(self) -> StepOutput:
        return self._output


class StubExecutor(Executor):
    """The model runner over the stub."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_blocks = max_num_seqs * MAX_MODEL_LEN // BLOCK_SIZE
        spec = AttentionSpec(1, 1, 1, 8, 8, BLOCK_SIZE, torch.float32, torch.float32, 1.0)
        self.program = StubProgram(max_num_seqs)
        limits = RunnerLimits(VOCAB, VOCAB, BLOCK_SIZE, MAX_MODEL_LEN, max_num_seqs, 2048)
        caches = [KVGroupCaches(ReferenceAttention(CPU), KVCache(spec, self.num_blocks, ()))]
        self.runner = ModelRunner(self.program, caches, limits, CPU)

    @property
    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(1 << 30, 1 << 30, 0, 0, BLOCK_SIZE, BLOCK_SIZE, self.num_blocks, 0)

    @property
    def manifest(self) -> Manifest:
        return Manifest(())

    @property
    def row_invariant(self) -> Support:
        return Support.yes()

    def facts(self) -> Mapping[str, str]:
        return {}

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.execute(step)

    def shutdown(self) -> None:
        pass


@dataclass
class Clock:
    """Microseconds of each part, a number a step."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def listen(self, owner: object, method: str, name: str) -> None:
        """Time every call of a method from now on."""
        wrapped: Callable[..., Any] = getattr(owner, method)
        times = self.parts.setdefault(name, [])

        def timed(*args: object, **named: object) -> Any:
            start = time.perf_counter()
            result = wrapped(*args, **named)
            times.append((time.perf_counter() - start) * 1e6)
            return result

        setattr(owner, method, timed)


@contextmanager
def decoding(batch: int, params: SamplingParams, **settings: Any) -> Iterator[EngineCore]:
    """An engine that decodes `batch` sequences, past their prompts."""
    config = EngineConfig.of(
        block_size=BLOCK_SIZE, max_model_len=MAX_MODEL_LEN, max_num_seqs=64, max_num_batched_tokens=2048, **settings
    )
    engine = EngineCore(config, StubExecutor(64))
    rng = np.random.default_rng(1)
    for number in range(batch):
        own = params if params.greedy else params.but(seed=number)
        engine.add_request(Request(str(number), rng.integers(1000, 20_000, 100).tolist(), own))
    for _ in range(NUM_WARM_UP):
        engine.step()
    yield engine
    engine.abort([str(number) for number in range(batch)])
    engine.step()


def time_steps(engine: EngineCore, num_steps: int) -> tuple[list[float], list[list[RequestUpdate]]]:
    """Microseconds of each step, and what the first of them gave."""
    times: list[float] = []
    gained: list[list[RequestUpdate]] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        updates = engine.step()
        times.append((time.perf_counter() - start) * 1e6)
        if len(gained) < NUM_KEPT:
            gained.append(updates)
    return times, gained


def time_front(tokenizer: Tokenizer, gained: list[list[RequestUpdate]], params: SamplingParams) -> list[float]:
    """Microseconds of what the offline loop does with each step's updates."""
    outputs, times = OutputProcessor(tokenizer), []
    for update in gained[0]:
        outputs.add(update.request_id, TokenizedPrompt([1, 2, 3], "a b c"), params)
    for updates in gained:
        start = time.perf_counter()
        for update in updates:
            outputs.take(update)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def report(name: str, times: list[float]) -> None:
    """One line."""
    low, median, high = np.percentile(times, (10, 50, 90))
    print(f"  {name:<34}{median:9.1f} us   ({low:.1f} to {high:.1f})")


def demo_tokenizer() -> Tokenizer | None:
    """The demo model's, where it can be had."""
    try:
        return load_tokenizer(resolve_model("demo", progress=False).tokenizer)
    except (OctavoError, OSError):
        return None


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8, top_p 0.95 and a seed each")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    if args.sampled:
        params = params.but(temperature=0.8, top_p=0.95)
    tokenizer = demo_tokenizer()
    for batch in args.batch:
        print(f"batch {batch}, {'sampled' if args.sampled else 'greedy'}")
        with decoding(batch, params) as engine:
            times, gained = time_steps(engine, args.steps)
        report("whole step", times)
        clock = Clock()
        with decoding(batch, params) as engine:
            runner: Any = engine.executor.runner  # type: ignore[attr-defined]
            for owner, method, name in (
                (engine.scheduler, "schedule", "schedule"),
                (engine.executor, "execute_model", "execute (build, submit, take)"),
                (runner._builder, "build", "  of it build"),
                (runner._program, "submit", "  of it submit (stub)"),
                (runner._sampler, "sample", "  of it sampler"),
                (engine.scheduler, "update", "update"),
            ):
                clock.listen(owner, method, name)
            time_steps(engine, args.steps)
        for name, part in clock.parts.items():
            if part:
                report(name, part)
        if tokenizer is not None:
            report("front: text and outputs", time_front(tokenizer, gained, params))


if __name__ == "__main__":
    main()
