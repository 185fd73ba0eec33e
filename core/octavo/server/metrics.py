"""GET /metrics: what dashboards, routers and autoscalers scrape.

Nothing is counted twice: gauges and counters are read from the engine when somebody scrapes, and each histogram
shows its one set of buckets under every name that it goes by. What is ours begins with `octavo:`; with the names of
vLLM, today's and those of 0.7, dashboards made for it go on working.

A scrape is taken at one moment, so that what it shows adds up: requests received are those that finished, run, wait
or are swapped out; blocks are free, used or cached; prompt tokens were computed or cached.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.history import RequestRecord
from octavo.engine.wire import WireStats
from octavo.server.metric_names import ABSENT, COUNTERS, FINISHED, HISTOGRAMS, NOT_NUMBERS, REJECTIONS

__all__ = ["Metrics", "Scrape", "metrics"]


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


class Metrics:
    """Observes an engine, and shows what it has seen."""

    def __init__(self, engine: AsyncEngine, model: str, *, with_vllm_names: bool = True) -> None:
        self._engine = engine
        self._model = model
        self._with_vllm_names = with_vllm_names
        self._histograms = {
            name: _Buckets(bounds, [0] * (len(bounds) + 1)) for name, (_, bounds, _) in HISTOGRAMS.items()
        }
        self._ends = dict.fromkeys(FINISHED, 0)
        self._rejections = dict.fromkeys(REJECTIONS, 0)
        self._num_corrupted = 0
        engine.observe(self)

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
        self._num_corrupted += NOT_NUMBERS in (record.error or "")
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

    def scrape(self) -> "Scrape":
        """What there is to show at this moment; to be called where the engine is, and shown anywhere."""
        engine, history = self._engine, self._engine.history
        cache, limits = engine.config.cache, engine.config.scheduler
        num_guessed = limits.num_speculative_tokens if limits.speculative_method != "none" else 1
        counts = {
            name: sum(history.totals.get(count, 0) for count in found) for name, (_, found, _) in COUNTERS.items()
        }
        counts |= {"requests_received": history.num_received, "requests_finished": history.num_finished}
        counts |= {"engine_restarts": engine.num_restarts, "corrupted_requests": self._num_corrupted}
        return Scrape(
            model=self._model,
            with_vllm_names=self._with_vllm_names,
            is_ready=engine.state == "ready",
            stats=engine.stats if engine.state == "ready" else WireStats(),
            num_in=dict(history.num_in),
            num_unqueued=history.num_unqueued,
            counts=counts,
            ends=dict(self._ends),
            rejections=dict(self._rejections),
            accepted_at={str(at): history.totals.get(f"num_accepted_at_{at}", 0) for at in range(num_guessed)},
            histograms={name: (buckets.cumulative(), buckets.total) for name, buckets in self._histograms.items()},
            settings={name: str(getattr(cache, name)) for name in cache.__dataclass_fields__},
        )


@dataclass(frozen=True)
class Scrape(Collector):
    """Everything that is shown, as it was at one moment.

    Attributes:
        model: the name that samples carry.
        with_vllm_names: whether vLLM's names are shown too.
        is_ready: whether requests are served.
        stats: of the engine.
        num_in: requests by state.
        num_unqueued: those that the engine has not queued yet.
        counts: counters by our name.
        ends, rejections: requests by finish reason, and by why they were refused.
        accepted_at: guessed tokens that were right, by their place in the guess.
        histograms: (numbers of values up to each bound, their sum), by our name.
        settings: of the KV cache.

    """

    model: str
    with_vllm_names: bool
    is_ready: bool
    stats: WireStats
    num_in: Mapping[str, int]
    num_unqueued: int
    counts: Mapping[str, int]
    ends: Mapping[str, int]
    rejections: Mapping[str, int]
    accepted_at: Mapping[str, int]
    histograms: Mapping[str, tuple[list[tuple[str, float]], float]]
    settings: Mapping[str, str]

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self)

    def collect(self) -> Iterable[Metric]:
        """Every metric under all of its names."""
        yield from self._gauges()
        yield from self._infos()
        yield from self._counters()
        for name, (about, _, theirs) in HISTOGRAMS.items():
            cumulative, total = self.histograms[name]
            for full in self._names(name, theirs):
                family = HistogramMetricFamily(full, about, labels=["model_name"])
                family.add_metric([self.model], cumulative, total)
                yield family

    def _names(self, ours: str | None, theirs: Iterable[str]) -> Iterator[str]:
        if ours is not None:
            yield f"octavo:{ours}"
        if self.with_vllm_names:
            yield from (f"vllm:{name}" for name in theirs)

    def _gauge(self, ours: str | None, theirs: Sequence[str], about: str, value: float) -> Iterator[Metric]:
        for name in self._names(ours, theirs):
            family = GaugeMetricFamily(name, about, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _counter(self, ours: str | None, theirs: Sequence[str], about: str, value: float) -> Iterator[Metric]:
        for name in self._names(ours, theirs):
            family = CounterMetricFamily(name, about, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _labelled(
        self, kind: type[Metric], names: Iterable[str], about: str, label: str, values: Mapping[str, float]
    ) -> Iterator[Metric]:
        for name in names:
            family = kind(name, about, labels=["model_name", label])  # type: ignore[call-arg]
            for value, number in values.items():
                family.add_metric([self.model, value], number)  # type: ignore[attr-defined]
            yield family

    def _gauges(self) -> Iterator[Metric]:
        stats, num_in, gauge = self.stats, self.num_in, self._gauge
        running, waiting, swapped = "num_requests_running", "num_requests_waiting", "num_requests_swapped"
        yield from gauge(running, [running], "Requests admitted and not answered in full yet.", num_in["running"])
        yield from gauge(waiting, [waiting], "Requests that wait.", num_in["waiting"])
        yield from gauge(swapped, [swapped], "Requests with blocks on the host.", num_in["swapped"])
        reasons = {"capacity": max(num_in["waiting"] - self.num_unqueued, 0), "deferred": self.num_unqueued}
        names = self._names("num_requests_waiting_by_reason", ["num_requests_waiting_by_reason"])
        about = "Those that wait: for blocks or a place; deferred: not queued by the engine yet."
        yield from self._labelled(GaugeMetricFamily, names, about, "reason", reasons)
        yield from gauge("num_live_requests", [], "Requests under way.", sum(num_in.values()))
        yield from gauge("engine_ready", [], "Whether requests are served.", self.is_ready)

        usages = ["kv_cache_usage_perc", "gpu_cache_usage_perc"]
        usage = _share(stats.num_used_blocks, stats.num_blocks)
        yield from gauge("kv_cache_usage_ratio", usages, "Used KV blocks, 0 to 1.", usage)
        usage = _share(stats.num_used_host_blocks, stats.num_host_blocks)
        yield from gauge("host_cache_usage_ratio", ["cpu_cache_usage_perc"], "Used host blocks, 0 to 1.", usage)
        hits = _share(self.counts["prompt_tokens_cached"], self.counts["prompt_tokens"])
        rates = ["gpu_prefix_cache_hit_rate"]
        yield from gauge("prefix_cache_hit_ratio", rates, "Prompt tokens cached, 0 to 1.", hits)
        yield from gauge(None, ["cpu_prefix_cache_hit_rate"], "None are looked up on the host.", 0.0)
        num_free = stats.num_blocks - stats.num_used_blocks - stats.num_cached_blocks
        for kind, number, about in (
            ("", stats.num_blocks, "KV blocks."),
            ("free_", num_free, "KV blocks that are free and hold nothing."),
            ("used_", stats.num_used_blocks, "KV blocks that requests hold."),
            ("cached_", stats.num_cached_blocks, "KV blocks that are free and hold what the prefix cache finds."),
            ("shared_", stats.num_shared_blocks, "Used KV blocks that several samples hold."),
            ("host_", stats.num_host_blocks, "KV blocks in host memory, for requests that are swapped out."),
            ("used_host_", stats.num_used_host_blocks, "Those that requests hold."),
        ):
            yield from gauge(f"num_{kind}blocks", [], about, number)

        drafted, rates = self.counts["draft_tokens"], ["spec_decode_draft_acceptance_rate"]
        rate = _share(self.counts["accepted_tokens"], drafted)
        yield from gauge("draft_acceptance_ratio", rates, "Guessed tokens that were right, 0 to 1.", rate)
        efficiency = _share(self.counts["emitted_tokens"], drafted + self.counts["drafts"])
        about = "Tokens that came of guesses, over the most that could have."
        yield from gauge("draft_efficiency_ratio", ["spec_decode_efficiency"], about, efficiency)
        awake = {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
        names = self._names(None, ["engine_sleep_state"])
        yield from self._labelled(GaugeMetricFamily, names, "It does not sleep.", "sleep_state", awake)

    def _infos(self) -> Iterator[Metric]:
        settings = {**self.settings, "num_gpu_blocks": str(self.stats.num_blocks)}
        settings["num_cpu_blocks"] = str(self.stats.num_host_blocks)
        for name in self._names("cache_config_info", ["cache_config_info"]):
            family = GaugeMetricFamily(name, "Settings of the KV cache.", labels=["model_name", *settings])
            family.add_metric([self.model, *settings.values()], 1)
            yield family
        for name in self._names(None, ["lora_requests_info"]):
            labels = ["model_name", "running_lora_adapters", "max_lora", "waiting_lora_adapters"]
            family = GaugeMetricFamily(name, "There are no adapters.", labels=labels)
            family.add_metric([self.model, "", "0", ""], 0)
            yield family

    def _counters(self) -> Iterator[Metric]:
        for name, (about, _, theirs) in COUNTERS.items():
            yield from self._counter(name, theirs, about, self.counts[name])
        corrupted = "corrupted_requests"
        for name, theirs, about in (
            ("requests_received", (), "Requests that came, and were not refused at once."),
            ("requests_finished", (), "Those that ended, whatever became of them."),
            ("engine_restarts", (), "Engine processes replaced."),
            (corrupted, (corrupted,), "Requests whose logits or hidden states were not numbers."),
        ):
            yield from self._counter(name, theirs, about, self.counts[name])
        for name in ABSENT:
            yield from self._counter(None, (name,), "Not there: always 0.", 0)
        names = self._names("accepted_tokens_per_pos", ["spec_decode_num_accepted_tokens_per_pos"])
        about = "Guessed tokens that were right, by their place in the guess."
        yield from self._labelled(CounterMetricFamily, names, about, "position", self.accepted_at)
        sources = {
            "local_compute": self.counts["prompt_tokens_computed"],
            "local_cache_hit": self.counts["prompt_tokens_cached"],
            "external_kv_transfer": 0,
        }
        for stem, label, values in (
            ("prompt_tokens_by_source", "source", sources),
            ("request_success", "finished_reason", self.ends),
            ("admission_rejections", "reason", self.rejections),
        ):
            names = self._names(stem, [stem])
            yield from self._labelled(CounterMetricFamily, names, f"By {label}.", label, values)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    shown: Metrics = request.app.state.metrics
    scrape = shown.scrape()
    return Response(await asyncio.to_thread(scrape.text), media_type=CONTENT_TYPE_LATEST)
