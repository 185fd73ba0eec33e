"""GET /metrics: what dashboards, routers and autoscalers scrape.

Nothing is counted twice: gauges and counters are read from the engine when somebody scrapes, and each histogram
shows its one set of buckets under every name that it goes by. What is ours begins with `octavo:`; with the names of
vLLM, today's and those of 0.7, dashboards made for it go on working.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.history import RequestRecord
from octavo.engine.wire import WireStats

__all__ = ["REJECTIONS", "Metrics", "metrics"]

REJECTIONS = ("queue_requests", "queue_tokens", "deadline")
FINISHED = ("stop", "length", "abort", "error")

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0),
    40.0,
    160.0,
)
SLOW = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    960.0,
    7680.0,
)
SIZES = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP = tuple(float(2**power) for power in range(15))

# Our name: what it is, bounds, and vLLM's names for the same.
HISTOGRAMS: dict[str, tuple[str, Sequence[float], tuple[str, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST, ("time_to_first_token_seconds",)),
    "inter_token_latency_seconds": (
        "Between a request's tokens.",
        FAST,
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    "request_time_per_output_token_seconds": (
        "A request's mean time between tokens.",
        FAST,
        ("request_time_per_output_token_seconds",),
    ),
    "e2e_request_latency_seconds": ("From arrival to the end.", SLOW, ("e2e_request_latency_seconds",)),
    "request_queue_time_seconds": (
        "From arrival to admission.",
        SLOW,
        ("request_queue_time_seconds", "time_in_queue_requests"),
    ),
    "request_inference_time_seconds": ("From admission to the end.", SLOW, ("request_inference_time_seconds",)),
    "request_prefill_time_seconds": ("From admission to the first token.", SLOW, ("request_prefill_time_seconds",)),
    "request_decode_time_seconds": ("From the first token to the last.", SLOW, ("request_decode_time_seconds",)),
    "iteration_tokens_total": ("Tokens that a step computed.", STEP, ("iteration_tokens_total",)),
    "request_prompt_tokens": ("Tokens of prompts.", SIZES, ("request_prompt_tokens",)),
    "request_generation_tokens": ("Tokens generated a request.", SIZES, ("request_generation_tokens",)),
    "request_max_num_generation_tokens": (
        "Tokens generated a sample.",
        SIZES,
        ("request_max_num_generation_tokens",),
    ),
    "request_params_n": ("Samples asked for.", FEW, ("request_params_n",)),
    "request_params_max_tokens": ("max_tokens asked for.", SIZES, ("request_params_max_tokens",)),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens that the prefix cache had not.",
        SIZES,
        ("request_prefill_kv_computed_tokens",),
    ),
    "request_num_preemptions": ("How often a request was preempted.", (0.0, *FEW), ("request_num_preemptions",)),
}

# Our name: what it is, the count of the engine, and vLLM's names.
COUNTERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "prompt_tokens": (
        "Prompt tokens done: computed or cached.",
        ("num_computed_prompt_tokens", "num_cached_prompt_tokens"),
        ("prompt_tokens",),
    ),
    "prompt_tokens_cached": ("Prompt tokens cached.", ("num_cached_prompt_tokens",), ("prompt_tokens_cached",)),
    "prompt_tokens_computed": ("Prompt tokens computed, each once.", ("num_computed_prompt_tokens",), ()),
    "generation_tokens": ("Tokens generated.", ("num_generated_tokens",), ("generation_tokens",)),
    "tokens": (
        "Prompt tokens done and tokens generated.",
        ("num_computed_prompt_tokens", "num_cached_prompt_tokens", "num_generated_tokens"),
        ("tokens",),
    ),
    "prefix_cache_queries": (
        "Prompt tokens looked up in the prefix cache.",
        ("num_computed_prompt_tokens", "num_cached_prompt_tokens"),
        ("prefix_cache_queries",),
    ),
    "prefix_cache_hits": ("Those found.", ("num_cached_prompt_tokens",), ("prefix_cache_hits",)),
    "num_preemptions": ("Requests taken off the device.", ("num_preemptions",), ("num_preemptions",)),
    "num_swaps": ("Those whose blocks went to the host.", ("num_swaps",), ()),
    "computed_tokens": ("Tokens through the model, again or not.", ("num_computed_tokens",), ()),
    "recomputed_tokens": ("Tokens computed again after a preemption.", ("num_recomputed_tokens",), ()),
    "steps": ("Steps.", ("num_steps",), ()),
    "failed_steps": ("Steps that failed.", ("num_failed_steps",), ()),
}

ABSENT = (  # counters of what is not there: vLLM's dashboards find a 0
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "mm_cache_queries",
    "mm_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_emitted_tokens",
)


@dataclass
class _Buckets:
    """One histogram's counts: [i] of values in (bounds[i-1], bounds[i]], the last of what is greater."""

    bounds: Sequence[float]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """As the exposition has them: (bound, number of values up to it)."""
        number, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), list(self.counts), strict=True):
            number += count
            buckets.append((bound, float(number)))
        return buckets


class Metrics(Collector):
    """Observes an engine, and shows what it has seen to a registry of its own."""

    def __init__(self, engine: AsyncEngine, model: str, *, with_vllm_names: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._model = model
        self._with_vllm_names = with_vllm_names
        self._histograms = {
            name: _Buckets(bounds, [0] * (len(bounds) + 1)) for name, (_, bounds, _) in HISTOGRAMS.items()
        }
        self._ends = dict.fromkeys(FINISHED, 0)
        self._rejections = dict.fromkeys(REJECTIONS, 0)
        engine.observe(self)
        self.registry.register(self)

    # What is seen

    def reject(self, reason: str) -> None:
        """A request was not taken, or not in time; one of REJECTIONS."""
        self._rejections[reason] += 1

    def on_step(self, stats: WireStats, gained: Mapping[str, int]) -> None:
        """The engine made a step."""
        if gained.get("num_steps"):
            self._histograms["iteration_tokens_total"].observe(gained.get("num_computed_tokens", 0))

    def on_tokens(self, record: RequestRecord, num_tokens: int, seconds: float | None) -> None:
        """A request has new tokens."""
        if seconds is None:
            assert record.first_token is not None
            self._histograms["time_to_first_token_seconds"].observe(record.first_token - record.received)
        else:
            self._histograms["inter_token_latency_seconds"].observe(seconds)

    def on_end(self, record: RequestRecord) -> None:
        """A request has ended."""
        reasons = (record.finish_reason or "").split(", ")  # of its samples; a request counts once
        self._ends[next((reason for reason in FINISHED if reason in reasons), "error")] += 1
        if record.is_late:
            self.reject("deadline")
        assert record.finished is not None
        see = self._see
        see("e2e_request_latency_seconds", record.finished - record.received)
        see("request_prompt_tokens", record.num_prompt_tokens)
        see("request_generation_tokens", record.num_generated_tokens)
        see("request_max_num_generation_tokens", record.num_generated_tokens / record.n)
        see("request_params_n", record.n)
        see("request_params_max_tokens", record.max_tokens)
        see("request_num_preemptions", record.num_preemptions)
        if record.admitted is None:
            return
        see("request_queue_time_seconds", record.admitted - record.received)
        see("request_inference_time_seconds", record.finished - record.admitted)
        see("request_prefill_kv_computed_tokens", record.num_prompt_tokens - record.num_cached_tokens)
        if record.first_token is not None and record.last_token is not None:
            see("request_prefill_time_seconds", record.first_token - record.admitted)
            see("request_decode_time_seconds", record.last_token - record.first_token)
            if record.num_generated_tokens > record.n:
                mean = (record.last_token - record.first_token) / (record.num_generated_tokens / record.n - 1)
                see("request_time_per_output_token_seconds", mean)

    def _see(self, name: str, value: float | None) -> None:
        if value is not None:
            self._histograms[name].observe(max(value, 0.0))

    # What is shown

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Every metric under all of its names."""
        yield from self._gauges()
        yield from self._counters()
        for name, (about, _, theirs) in HISTOGRAMS.items():
            buckets = self._histograms[name]
            cumulative, total = buckets.cumulative(), buckets.total
            for full in self._names(name, theirs):
                family = HistogramMetricFamily(full, about, labels=["model_name"])
                family.add_metric([self._model], cumulative, total)
                yield family

    def _names(self, ours: str | None, theirs: Iterable[str]) -> Iterator[str]:
        if ours is not None:
            yield f"octavo:{ours}"
        if self._with_vllm_names:
            yield from (f"vllm:{name}" for name in theirs)

    def _gauge(self, ours: str | None, theirs: Sequence[str], about: str, value: float) -> Iterator[Metric]:
        for name in self._names(ours, theirs):
            family = GaugeMetricFamily(name, about, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family

    def _labelled(
        self, kind: type[Metric], names: Iterable[str], about: str, label: str, values: Mapping[str, float]
    ) -> Iterator[Metric]:
        for name in names:
            family = kind(name, about, labels=["model_name", label])  # type: ignore[call-arg]
            for value, number in values.items():
                family.add_metric([self._model, value], number)  # type: ignore[attr-defined]
            yield family

    def _gauges(self) -> Iterator[Metric]:
        engine, totals = self._engine, self._engine.history.totals
        stats = engine.stats if engine.state == "ready" else WireStats()
        num_done = totals.get("num_computed_prompt_tokens", 0) + totals.get("num_cached_prompt_tokens", 0)
        hit_rate = totals.get("num_cached_prompt_tokens", 0) / num_done if num_done else 0.0
        usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
        running, waiting, swapped = "num_requests_running", "num_requests_waiting", "num_requests_swapped"
        yield from self._gauge(running, [running], "Requests on the device.", stats.num_running)
        yield from self._gauge(waiting, [waiting], "Requests that wait.", stats.num_waiting)
        yield from self._gauge(swapped, [swapped], "Requests with blocks on the host.", stats.num_swapped)
        names = self._names("num_requests_waiting_by_reason", ["num_requests_waiting_by_reason"])
        reasons = {"capacity": stats.num_waiting, "deferred": stats.num_swapped}
        yield from self._labelled(GaugeMetricFamily, names, "Requests that wait, and why.", "reason", reasons)
        usages = ["kv_cache_usage_perc", "gpu_cache_usage_perc"]
        yield from self._gauge("kv_cache_usage_ratio", usages, "Used KV blocks, 0 to 1.", usage)
        yield from self._gauge(None, ["cpu_cache_usage_perc"], "Used host blocks, 0 to 1.", 0.0)
        rates = ["gpu_prefix_cache_hit_rate"]
        yield from self._gauge("prefix_cache_hit_ratio", rates, "Prompt tokens cached, 0 to 1.", hit_rate)
        yield from self._gauge(None, ["cpu_prefix_cache_hit_rate"], "None are looked up on the host.", 0.0)
        for kind in ("used", "cached", "shared"):
            value = getattr(stats, f"num_{kind}_blocks")
            yield from self._gauge(f"num_{kind}_blocks", [], f"KV blocks that are {kind}.", value)
        yield from self._gauge("num_blocks", [], "KV blocks.", stats.num_blocks)
        yield from self._gauge("num_live_requests", [], "Requests under way at the front.", engine.num_live)
        yield from self._gauge("engine_ready", [], "Whether requests are served.", engine.state == "ready")
        yield from self._gauge(None, ["spec_decode_draft_acceptance_rate"], "Nothing is drafted.", 0.0)
        yield from self._gauge(None, ["spec_decode_efficiency"], "Nothing is drafted.", 0.0)
        awake = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        names = self._names(None, ["engine_sleep_state"])
        yield from self._labelled(GaugeMetricFamily, names, "It does not sleep.", "sleep_state", awake)
        yield from self._infos()

    def _infos(self) -> Iterator[Metric]:
        cache = self._engine.config.cache
        settings = {name: str(getattr(cache, name)) for name in cache.__dataclass_fields__}
        settings["num_gpu_blocks"] = str(self._engine.stats.num_blocks)
        for name in self._names("cache_config_info", ["cache_config_info"]):
            family = GaugeMetricFamily(name, "Settings of the KV cache.", labels=["model_name", *settings])
            family.add_metric([self._model, *settings.values()], 1)
            yield family
        for name in self._names(None, ["lora_requests_info"]):
            labels = ["model_name", "running_lora_adapters", "max_lora", "waiting_lora_adapters"]
            family = GaugeMetricFamily(name, "There are no adapters.", labels=labels)
            family.add_metric([self._model, "", "0", ""], 0)
            yield family

    def _counters(self) -> Iterator[Metric]:
        totals = self._engine.history.totals
        for name, (about, counts, theirs) in COUNTERS.items():
            yield from self._counter(name, theirs, about, sum(totals.get(count, 0) for count in counts))
        yield from self._counter("engine_restarts", (), "Engine processes replaced.", self._engine.num_restarts)
        for name in ABSENT:
            yield from self._counter(None, (name,), "Not there: always 0.", 0)
        sources = {
            "local_compute": totals.get("num_computed_prompt_tokens", 0),
            "local_cache_hit": totals.get("num_cached_prompt_tokens", 0),
            "external_kv_transfer": 0,
        }
        for stem, label, values in (
            ("prompt_tokens_by_source", "source", sources),
            ("request_success", "finished_reason", self._ends),
            ("admission_rejections", "reason", self._rejections),
        ):
            names = self._names(stem, [stem])
            yield from self._labelled(CounterMetricFamily, names, f"By {label}.", label, values)

    def _counter(self, ours: str | None, theirs: Sequence[str], about: str, value: float) -> Iterator[Metric]:
        for name in self._names(ours, theirs):
            family = CounterMetricFamily(name, about, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    shown: Metrics = request.app.state.metrics
    return Response(await asyncio.to_thread(shown.text), media_type=CONTENT_TYPE_LATEST)
