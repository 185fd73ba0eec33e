"""A scheduler over a paged executor, step by step, with every invariant checked at each."""

from collections.abc import Iterable
from typing import Any

from doubles.paged_executor import PagedExecutor, StepError, expected_tokens
from octavo.cache.manager import BlockManager
from octavo.config import SchedulerConfig
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import RequestUpdate
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler

__all__ = ["SIZE", "Bench"]

SIZE = 4  # tokens a block


class Bench:
    """A scheduler over a paged executor, with what each request was given."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        num_host_blocks: int = 0,
        caching: bool = True,
        max_model_len: int = 256,
        memory: int = 0,
        **config: Any,
    ) -> None:
        config.setdefault("max_num_batched_tokens", 64)
        self.manager = BlockManager(num_blocks, SIZE, num_host_blocks=num_host_blocks, prefix_caching=caching)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.manager, max_model_len)
        self.executor = PagedExecutor(num_blocks, SIZE, num_host_blocks, memory=memory)
        self.tokens: dict[str, dict[int, list[int]]] = {}
        self.reasons: dict[str, dict[int, str]] = {}
        self.requests: dict[str, Request] = {}

    def add(
        self, name: str, prompt: Iterable[int], *, eos: Iterable[int] = (), priority: int = 0, **params: Any
    ) -> Request:
        params.setdefault("max_tokens", 5)
        request = Request(
            name, list(prompt), SamplingParams(seed=1, **params), eos_token_ids=frozenset(eos), priority=priority
        )
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def take(self, updates: Iterable[RequestUpdate]) -> None:
        for update in updates:
            for sample in update.samples:
                tokens = self.tokens.setdefault(update.request_id, {}).setdefault(sample.index, [])
                tokens.extend(sample.token_ids)
                if sample.finish_reason:
                    reasons = self.reasons.setdefault(update.request_id, {})
                    assert sample.index not in reasons, "a sample finished twice"
                    reasons[sample.index] = sample.finish_reason

    def step(self) -> list[str]:
        """One step; returns who computed."""
        output = self.scheduler.schedule()
        self.scheduler.check()
        if output is None:
            assert not self.scheduler.requests, "requests are left and no step can be formed"
            self.take(self.scheduler.take_updates())
            return []
        names = {seq.seq_id: r.request_id for r in self.requests.values() for seq in r.sequences}
        try:
            result = self.executor.execute_model(output)
        except StepError as error:
            self.take(self.scheduler.fail_step(str(error)))
        else:
            self.take(self.scheduler.update(result))
        self.scheduler.check()
        return [names[s.seq_id] for s in output.scheduled]

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.requests, "requests are left"
        if self.scheduler.roster.removed:
            self.step()
        assert not self.executor.sequences, "the executor holds sequences that ended"

    def check_counts(self) -> None:
        """Tokens in are tokens computed or cached; what was computed twice says so."""
        stats = self.scheduler.stats
        known = sum(r.num_prompt_tokens for r in self.requests.values() if r.num_cached_tokens is not None)
        assert stats.num_prompt_tokens == known
        done = sum(r.num_prompt_done for r in self.requests.values())
        assert stats.num_computed_prompt_tokens + stats.num_cached_prompt_tokens == done
        assert stats.num_recomputed_tokens == sum(r.num_recomputed_tokens for r in self.requests.values())
        if stats.num_preemptions:
            return
        assert stats.num_recomputed_tokens == 0
        computed = 0
        for request in self.requests.values():
            for seq in request.sequences:
                start = (request.num_cached_tokens or 0) if seq.sample_index == 0 else request.num_prompt_tokens
                computed += max(seq.num_once_computed - start, 0)
        assert stats.num_computed_tokens == computed

    def check_tokens(self, name: str) -> None:
        request = self.requests[name]
        for index in range(request.params.n):
            expected = expected_tokens(
                request.prompt_token_ids,
                request.params,
                index,
                request.max_output_tokens,
                request.eos_token_ids,
                self.executor.memory,
            )
            assert self.tokens.get(name, {}).get(index, []) == expected, f"{name}[{index}]"

    def check_tokens_so_far(self, name: str) -> None:
        """For a request that was cut short."""
        request = self.requests[name]
        for index, tokens in self.tokens.get(name, {}).items():
            memory = self.executor.memory
            expected = expected_tokens(request.prompt_token_ids, request.params, index, len(tokens), memory=memory)
            assert tokens == expected

    def check_all(self) -> None:
        for name in self.requests:
            self.check_tokens(name)
        self.check_counts()
