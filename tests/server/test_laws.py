"""What /metrics shows adds up at every scrape, under load and swap, and every name that others scrape is there."""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.served import Served

FINISHED = ("stop", "length", "abort", "error")

# What dashboards, routers and autoscalers scrape of vLLM: a name as it is exposed, and its type. Those that vLLM
# itself shows only with detailed traces or kv_cache_metrics are left out.
VLLM = {
    "gauge": """
        num_requests_running num_requests_waiting num_requests_swapped num_requests_waiting_by_reason
        gpu_cache_usage_perc cpu_cache_usage_perc kv_cache_usage_perc gpu_prefix_cache_hit_rate
        cpu_prefix_cache_hit_rate lora_requests_info cache_config_info engine_sleep_state
        spec_decode_draft_acceptance_rate spec_decode_efficiency""",
    "counter": """
        num_preemptions prompt_tokens generation_tokens tokens request_success prefix_cache_queries prefix_cache_hits
        external_prefix_cache_queries external_prefix_cache_hits mm_cache_queries mm_cache_hits prompt_tokens_cached
        prompt_tokens_by_source corrupted_requests admission_rejections spec_decode_num_accepted_tokens
        spec_decode_num_draft_tokens spec_decode_num_emitted_tokens spec_decode_num_drafts
        spec_decode_num_accepted_tokens_per_pos""",
    "histogram": """
        iteration_tokens_total time_to_first_token_seconds time_per_output_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
        request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds time_in_queue_requests
        request_prompt_tokens request_generation_tokens request_max_num_generation_tokens request_params_n
        request_params_max_tokens request_prefill_kv_computed_tokens request_num_preemptions""",
}
OURS = {
    "gauge": """
        num_requests_running num_requests_waiting num_requests_swapped num_requests_waiting_by_reason num_live_requests
        engine_ready kv_cache_usage_ratio host_cache_usage_ratio prefix_cache_hit_ratio num_blocks num_free_blocks
        num_used_blocks num_cached_blocks num_shared_blocks num_host_blocks num_used_host_blocks draft_acceptance_ratio
        draft_efficiency_ratio cache_config_info""",
    "counter": """
        requests_received requests_finished requests_admitted engine_restarts corrupted_requests prompt_tokens
        prompt_tokens_cached prompt_tokens_computed prompt_tokens_by_source generation_tokens tokens
        prefix_cache_queries prefix_cache_hits num_preemptions num_swaps computed_tokens recomputed_tokens steps
        failed_steps request_success admission_rejections drafts draft_tokens accepted_tokens emitted_tokens
        accepted_tokens_per_pos""",
    "histogram": """
        iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds
        request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
        request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens
        request_generation_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens
        request_prefill_kv_computed_tokens request_num_preemptions""",
}
# By label: the values that are there from the start.
LABELS = {
    "request_success_total": ("finished_reason", FINISHED),
    "admission_rejections_total": ("reason", ("queue_requests", "queue_tokens", "deadline")),
    "num_requests_waiting_by_reason": ("reason", ("capacity", "deferred")),
    "prompt_tokens_by_source_total": ("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),
}


class Shown:
    """One scrape: the types of its families, and its samples by name and by the label that they have."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            assert family.name not in self.types, f"{family.name} is shown twice"
            self.types[family.name] = family.type
            assert family.samples, f"{family.name} has no samples"
            for sample in family.samples:
                labels = [value for name, value in sample.labels.items() if name != "model_name"]
                self.values["/".join([sample.name, *labels])] = sample.value

    def __getitem__(self, name: str) -> float:
        return self.values[f"octavo:{name}"]

    def sum(self, name: str) -> float:
        """Over all label values."""
        return sum(self[f"{name}/{value}"] for value in LABELS[name][1])

    def check(self) -> None:
        """The laws that hold at any time."""
        num_live = self["num_requests_running"] + self["num_requests_waiting"] + self["num_requests_swapped"]
        assert self["requests_received_total"] == self["requests_finished_total"] + num_live
        assert self["num_live_requests"] == num_live
        assert self.sum("num_requests_waiting_by_reason") == self["num_requests_waiting"]
        assert self.sum("request_success_total") == self["requests_finished_total"]
        assert self["e2e_request_latency_seconds_count"] == self["requests_finished_total"]
        assert self["time_to_first_token_seconds_count"] <= self["requests_admitted_total"]
        assert self["requests_admitted_total"] <= self["requests_received_total"]
        blocks = [self[f"num_{kind}_blocks"] for kind in ("free", "used", "cached")]
        assert sum(blocks) == self["num_blocks"] and min(blocks) >= 0
        assert self["num_shared_blocks"] <= self["num_used_blocks"]
        assert 0 <= self["num_used_host_blocks"] <= self["num_host_blocks"]
        assert self["prompt_tokens_computed_total"] + self["prompt_tokens_cached_total"] == self["prompt_tokens_total"]
        assert self["prompt_tokens_total"] + self["generation_tokens_total"] == self["tokens_total"]
        assert self.sum("prompt_tokens_by_source_total") == self["prompt_tokens_total"]
        assert self["prefix_cache_hits_total"] <= self["prefix_cache_queries_total"]
        assert self["iteration_tokens_total_sum"] == self["computed_tokens_total"]
        assert self["iteration_tokens_total_count"] == self["steps_total"]
        assert self["num_swaps_total"] <= self["num_preemptions_total"]
        assert self["accepted_tokens_total"] <= self["draft_tokens_total"]
        for name, value in self.values.items():
            if name.startswith("vllm:") and (ours := self.values.get(name.replace("vllm:", "octavo:"))) is not None:
                assert value == ours, name


@pytest.fixture(scope="module")
def swapping(tiny_folder: Path) -> Iterator[Served]:
    """A server whose pool of blocks is so small that requests are swapped out."""
    served = Served(tiny_folder, num_blocks_override=40, preemption_mode="swap", swap_space=0.01, max_num_seqs=16)
    try:
        yield served.ready()
    finally:
        served.close()


def scrape(http: httpx.Client) -> Shown:
    shown = Shown(http.get("/metrics").text)
    shown.check()
    return shown


def test_every_name_that_others_scrape_is_there_with_its_type(http: httpx.Client) -> None:
    shown = scrape(http)
    for prefix, names in (("vllm", VLLM), ("octavo", OURS)):
        expected = {f"{prefix}:{name}": kind for kind, text in names.items() for name in text.split()}
        found = {name: kind for name, kind in shown.types.items() if name.startswith(prefix)}
        assert found == expected
    for name, (_, values) in LABELS.items():
        for prefix in ("octavo", "vllm"):
            assert {key for key in shown.values if key.startswith(f"{prefix}:{name}/")} == {
                f"{prefix}:{name}/{value}" for value in values
            }


def test_laws_hold_at_every_scrape_whatever_becomes_of_requests(swapping: Served) -> None:
    """40 requests, some of which leave midway, on blocks for a few of them; scraped all along."""
    chance = random.Random(7)
    scrapes: list[Shown] = []
    done = threading.Event()

    def send(number: int) -> int:
        prompt = [4 + 7 * i % 250 for i in range(8 * (number % 4))] + [5 + number] * (1 + number % 13)
        body = {"prompt": prompt, "max_tokens": chance.randint(1, 90), "n": 1 + number % 3 // 2, "ignore_eos": True}
        with httpx.Client(base_url=swapping.url, timeout=120) as client:
            if number % 8:
                return len(client.post("/v1/completions", json=body).json()["choices"])
            body |= {"stream": True, "max_tokens": 200}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                return 0

    def watch() -> None:
        with httpx.Client(base_url=swapping.url, timeout=60) as client:
            while not done.is_set():
                scrapes.append(Shown(client.get("/metrics").text))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with ThreadPoolExecutor(12) as threads:
            assert sum(threads.map(send, range(40))) > 35
    finally:
        done.set()
        watching.join()
    for shown in scrapes:
        shown.check()
    assert len(scrapes) > 10
    assert max(shown["num_requests_running"] for shown in scrapes) > 1
    assert max(shown["num_requests_swapped"] for shown in scrapes) > 0
    used = [shown["num_used_host_blocks"] for shown in scrapes]
    usages = [shown.values["vllm:cpu_cache_usage_perc"] for shown in scrapes]
    assert max(usages) > 0
    assert usages == [pytest.approx(used[i] / scrapes[i]["num_host_blocks"]) for i in range(len(used))]
    swapping.wait_until(swapping.is_idle)
    with httpx.Client(base_url=swapping.url) as client:
        last = scrape(client)
    assert last["requests_received_total"] == last["requests_finished_total"] == 40
    assert last["num_live_requests"] == last["num_used_blocks"] == last["num_used_host_blocks"] == 0
    assert last.values["vllm:cpu_cache_usage_perc"] == 0


def test_each_token_is_counted_once_however_often_it_is_computed(swapping: Served) -> None:
    """Through the model go: prompt tokens that were not cached, all tokens but the last of each sample, and again
    what a preemption threw away.
    """
    swapping.wait_until(swapping.is_idle)
    with httpx.Client(base_url=swapping.url, timeout=120) as client, ThreadPoolExecutor(10) as threads:
        before = scrape(client)
        prompts = [[9 + i] * (20 + 3 * i) for i in range(10)]
        bodies = [{"prompt": prompt, "max_tokens": 60, "ignore_eos": True} for prompt in prompts]
        for answer in threads.map(
            lambda body: httpx.post(f"{swapping.url}/v1/completions", json=body, timeout=120), bodies
        ):
            assert answer.json()["usage"]["completion_tokens"] == 60
        swapping.wait_until(swapping.is_idle)
        after = scrape(client)

    def gained(name: str) -> float:
        return after[f"{name}_total"] - before[f"{name}_total"]

    assert gained("prompt_tokens") == sum(map(len, prompts))
    assert gained("generation_tokens") == 600
    once = gained("prompt_tokens_computed") + gained("generation_tokens") - 10
    assert gained("computed_tokens") == once + gained("recomputed_tokens")
    assert gained("num_preemptions") > 0


def test_the_engine_at_a_glance_says_the_same(swapping: Served) -> None:
    swapping.wait_until(swapping.is_idle)
    with httpx.Client(base_url=swapping.url) as client:
        shown, engine = scrape(client), json.loads(client.get("/requests").text)["engine"]
    assert engine["blocks"]["host_total"] == shown["num_host_blocks"] > 0
    assert engine["blocks"]["cached"] == shown["num_cached_blocks"]
    assert (engine["num_running"], engine["num_waiting"], engine["num_swapped"]) == (0, 0, 0)


def test_guessed_tokens_are_counted_apart(tiny_folder: Path) -> None:
    served = Served(tiny_folder, speculative_config={"method": "ngram", "num_speculative_tokens": 4})
    try:
        with httpx.Client(base_url=served.ready().url, timeout=120) as client:
            body = {"prompt": [5, 6, 7, 8] * 10, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
            for _ in range(2):
                assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 200
            served.wait_until(served.is_idle)
            shown = scrape(client)
    finally:
        served.close()
    drafted, accepted, drafts = (shown[f"{name}_total"] for name in ("draft_tokens", "accepted_tokens", "drafts"))
    assert 0 < drafts <= drafted <= 4 * drafts
    assert 0 < accepted <= drafted
    at = [shown[f"accepted_tokens_per_pos_total/{place}"] for place in range(4)]
    assert at == sorted(at, reverse=True), "who is right at a place was right before it"
    assert at == [shown.values[f"vllm:spec_decode_num_accepted_tokens_per_pos_total/{place}"] for place in range(4)]
    assert sum(at) == accepted
    assert "octavo:accepted_tokens_per_pos_total/4" not in shown.values
    assert shown["emitted_tokens_total"] == accepted + drafts <= shown["generation_tokens_total"] == 400
    assert shown.values["vllm:spec_decode_draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    assert shown["computed_tokens_total"] == shown["prompt_tokens_computed_total"] + 400 - 2
