"""What is counted adds up, under every name that dashboards know; what is refused says when to come again."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.served import OPTIONS, Served

from octavo.engine.history import RequestRecord
from octavo.server.metric_names import ABSENT, COUNTERS, HISTOGRAMS
from octavo.server.metrics import Metrics
from octavo.server.options import ServerOptions

PROMPT = [4 + 7 * i % 250 for i in range(100)]


def scrape(http: httpx.Client) -> dict[str, float]:
    """What /metrics shows now."""
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def samples(text: str) -> dict[str, float]:
    """Sample name, with labels other than the model's, to value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {**sample.labels}
            assert labels.pop("model_name") == "tiny"
            own = ",".join(f"{name}={value}" for name, value in labels.items())
            found[f"{sample.name}{{{own}}}" if own else sample.name] = sample.value
    return found


@pytest.fixture(scope="module")
def fresh(tiny_folder: Path) -> httpx.Client:
    """A client of a server that has served nothing yet."""
    served = Served(tiny_folder, max_num_seqs=4)
    with httpx.Client(base_url=served.ready().url, timeout=60) as client:
        client.served = served  # type: ignore[attr-defined]
        yield client  # type: ignore[misc]
    served.close()


def test_every_name_is_there_from_the_start_at_0(fresh: httpx.Client) -> None:
    found = scrape(fresh)
    for prefix in ("octavo", "vllm"):
        for name in ("num_requests_running", "num_requests_waiting", "num_requests_swapped"):
            assert found[f"{prefix}:{name}"] == 0
        for reason in ("stop", "length", "abort", "error"):
            assert found[f"{prefix}:request_success_total{{finished_reason={reason}}}"] == 0
        for reason in ("queue_requests", "queue_tokens", "deadline"):
            assert found[f"{prefix}:admission_rejections_total{{reason={reason}}}"] == 0
    for ours, (_, _, theirs) in COUNTERS.items():
        assert all(found[name] == 0 for name in (f"octavo:{ours}_total", *(f"vllm:{name}_total" for name in theirs)))
    for ours, (_, _, theirs) in HISTOGRAMS.items():
        for name in (f"octavo:{ours}", *(f"vllm:{name}" for name in theirs)):
            assert found[f"{name}_count"] == found[f"{name}_sum"] == found[f"{name}_bucket{{le=+Inf}}"] == 0
    assert all(found[f"vllm:{name}_total"] == 0 for name in ABSENT)
    old_and_new = ("kv_cache_usage_perc", "gpu_cache_usage_perc", "cpu_cache_usage_perc", "gpu_prefix_cache_hit_rate")
    assert all(found[f"vllm:{name}"] == 0 for name in old_and_new)
    assert any(name.startswith("vllm:cache_config_info{") and "block_size=8" in name for name in found)


def test_tokens_in_are_computed_and_cached_and_each_request_counts_once(fresh: httpx.Client) -> None:
    before = scrape(fresh)
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
    for n in (1, 1, 3):
        assert fresh.post("/v1/completions", json={**body, "n": n}).status_code == 200
    after = scrape(fresh)

    def gained(name: str) -> float:
        return after[name] - before[name]

    for prefix in ("octavo", "vllm"):
        assert gained(f"{prefix}:prompt_tokens_total") == 3 * len(PROMPT)
        assert gained(f"{prefix}:prompt_tokens_cached_total") == 2 * 96
        assert gained(f"{prefix}:prompt_tokens_by_source_total{{source=local_compute}}") == len(PROMPT) + 2 * 4
        assert gained(f"{prefix}:prompt_tokens_by_source_total{{source=local_cache_hit}}") == 2 * 96
        assert gained(f"{prefix}:prefix_cache_hits_total") == 2 * 96
        assert gained(f"{prefix}:generation_tokens_total") == 6 * 5
        assert gained(f"{prefix}:tokens_total") == 3 * len(PROMPT) + 30
        assert gained(f"{prefix}:request_success_total{{finished_reason=length}}") == 3
        for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
            assert gained(f"{prefix}:{name}_count") == 3
        assert gained(f"{prefix}:request_generation_tokens_sum") == 30
        assert gained(f"{prefix}:request_prompt_tokens_sum") == 3 * len(PROMPT)
        assert gained(f"{prefix}:request_prefill_kv_computed_tokens_sum") == len(PROMPT) + 2 * 4
        assert gained(f"{prefix}:request_params_n_sum") == 5
        assert gained(f"{prefix}:inter_token_latency_seconds_count") == 3 * 5
    assert gained("octavo:recomputed_tokens_total") == 0
    assert gained("octavo:iteration_tokens_total_sum") == gained("octavo:computed_tokens_total")


class Midway:
    """Scrapes at a request's third token."""

    def __init__(self, served: Served) -> None:
        self.metrics = Metrics(served.engine, "tiny")
        self.found: dict[str, float] = {}
        served.engine.observe(self)

    def on_step(self, *_: object) -> None: ...

    def on_end(self, *_: object) -> None: ...

    def on_tokens(self, record: RequestRecord, *_: object) -> None:
        if record.num_generated_tokens == 3:
            self.found = samples(self.metrics.scrape().text().decode())


def test_counts_move_while_a_request_runs_and_nothing_runs_after_it_left(fresh: httpx.Client) -> None:
    served: Served = fresh.served  # type: ignore[attr-defined]
    before, midway = scrape(fresh), Midway(served)
    body = {"prompt": PROMPT[:20], "max_tokens": 480, "ignore_eos": True, "stream": True}
    with fresh.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # kept: where it is dropped, the client leaves
        next(lines)
        served.wait_until(lambda: bool(midway.found))
        during = midway.found
    assert during["vllm:generation_tokens_total"] > before["vllm:generation_tokens_total"]
    assert during["vllm:num_requests_running"] == 1
    assert during["vllm:kv_cache_usage_perc"] == during["vllm:gpu_cache_usage_perc"] > 0
    served.wait_until(served.is_idle)
    after = scrape(fresh)
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["vllm:kv_cache_usage_perc"] == after["octavo:num_used_blocks"] == 0
    ends = [f"octavo:request_success_total{{finished_reason={reason}}}" for reason in ("abort", "length")]
    assert sum(after[end] - before[end] for end in ends) == 1


def test_an_error_in_metrics_ends_no_request(fresh: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a planted fault")

    for name in ("on_step", "on_tokens", "on_end"):
        monkeypatch.setattr(Metrics, name, fail)
    answer = fresh.post("/v1/completions", json={"prompt": "One", "max_tokens": 4, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_names_of_others_can_be_left_out(served: Served) -> None:
    url = served.listen(ServerOptions(with_vllm_metrics=False))
    text = httpx.get(f"{url}/metrics").text
    assert "octavo:num_requests_running" in text
    assert "vllm:" not in text


def test_a_full_queue_says_when_to_come_again_and_a_deadline_ends_a_wait(tiny_folder: Path) -> None:
    served = Served(tiny_folder, ServerOptions(OPTIONS.served_model_names, max_waiting_requests=2), max_num_seqs=1)
    body = {"prompt": PROMPT[:30], "max_tokens": 2, "ignore_eos": True}
    with httpx.Client(base_url=served.ready().url, timeout=60) as client, ThreadPoolExecutor(2) as threads:
        history = served.engine.history
        os.kill(served.engine.pid, signal.SIGSTOP)  # so that whoever comes waits
        late = client.post("/v1/completions", json={**body, "timeout": 0.05})
        assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")
        waits = [threads.submit(client.post, "/v1/completions", json={**body, "timeout": 50}) for _ in range(2)]
        served.wait_until(lambda: history.num_waiting == 2)
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "at most 2 may (max_waiting_requests)" in refused.json()["error"]["message"]
        os.kill(served.engine.pid, signal.SIGCONT)
        assert [wait.result().status_code for wait in waits] == [200, 200]
        found = scrape(client)
        assert found["vllm:admission_rejections_total{reason=queue_requests}"] == 1
        assert found["vllm:admission_rejections_total{reason=deadline}"] == 1
        assert (history.num_waiting, history.num_waiting_tokens) == (0, 0)
        bad = client.post("/v1/completions", json=body, headers={"x-request-timeout": "soon"})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-timeout")
    served.close()
