"""Guesses of the next tokens: what is guessed, what they cost, and that they change no token."""

from collections.abc import Sequence

import pytest
from doubles.scheduler_bench import Bench
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.scheduler.ngrams import NgramIndex

ON = {"speculative_method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 4}


def slow_proposal(token_ids: Sequence[int], num_tokens: int, smallest: int, largest: int) -> list[int]:
    """The same by looking everywhere: the longest run that stood before, and of equals the latest."""
    ids = list(token_ids)
    for size in range(largest, smallest - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if size < len(ids) and ids[end - size : end] == ids[-size:]:
                guesses = list(ids)
                for i in range(num_tokens):
                    guesses.append(guesses[end + i])
                return guesses[len(ids) :]
    return []


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_index_finds_what_a_search_finds(pieces: list[list[int]], num: int, smallest: int, more: int) -> None:
    index, ids = NgramIndex(smallest, smallest + more), list[int]()
    for piece in pieces:
        ids += piece
        assert list(index.propose(ids, num)) == slow_proposal(ids, num, smallest, smallest + more)


def test_a_text_that_repeats_takes_fewer_steps_for_the_same_tokens() -> None:
    steps = []
    for settings in ({}, ON):
        bench = Bench(memory=1, **settings)
        for i in range(3):
            bench.add(str(i), [i, i + 1], max_tokens=60)
        bench.run()
        bench.check_all()
        steps.append(bench.scheduler.stats.num_steps)
    stats = bench.scheduler.stats
    assert steps[1] < steps[0] / 2
    assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens == bench.executor.num_drafts
    assert stats.num_drafts <= stats.num_draft_tokens


def test_nothing_is_guessed_unless_it_is_asked_for() -> None:
    bench = Bench(memory=1)
    bench.add("a", [1, 1, 1, 1], max_tokens=40)
    bench.run()
    assert bench.executor.num_drafts == bench.scheduler.stats.num_drafts == 0


def test_guesses_take_only_what_a_step_leaves() -> None:
    """The budget goes to known tokens first; and a guess takes no block that somebody could grow into."""
    bench = Bench(num_blocks=12, memory=1, max_num_batched_tokens=8, caching=False, **ON)
    bench.add("a", [7] * 6, max_tokens=12)
    bench.add("b", [7] * 20, max_tokens=12)
    for _ in range(200):
        output = bench.scheduler.schedule()
        if output is None:
            break
        assert output.num_tokens <= 8
        bench.take(bench.scheduler.update(bench.executor.execute_model(output)))
        bench.scheduler.check()
    bench.check_all()
    assert bench.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_no_guess_reaches_past_the_last_token(limit: int) -> None:
    bench = Bench(memory=1, **ON)
    request = bench.add("a", [3] * 9, max_tokens=limit)
    while bench.scheduler.has_work:
        output = bench.scheduler.schedule()
        if output is None:
            break
        for one in output.scheduled:
            assert one.num_computed + one.num_tokens + len(one.draft_token_ids) < 9 + limit or not one.draft_token_ids
        bench.take(bench.scheduler.update(bench.executor.execute_model(output)))
    bench.check_tokens("a")
    assert len(request.sequences[0].token_ids) == 9 + limit


def test_tokens_behind_an_end_are_dropped() -> None:
    bench = Bench(memory=1, **ON)
    alone = Bench(memory=1)
    alone.add("a", [2, 2], max_tokens=40)
    alone.run()
    end = alone.tokens["a"][0][-2]
    bench.add("a", [2, 2], max_tokens=40, eos=[end])
    bench.add("b", [2, 2], max_tokens=40, stop_token_ids=(end,))
    bench.run()
    bench.check_all()
    assert bench.tokens["a"][0][-1] == bench.tokens["b"][0][-1] == end
    assert bench.reasons == {"a": {0: "stop"}, "b": {0: "stop"}}


def test_only_blocks_of_right_guesses_are_published() -> None:
    """Whoever comes next with the same tokens finds what was known, and gets his own."""
    bench = Bench(**ON)  # tokens that depend on all before them: nearly every guess is wrong
    first = bench.add("first", [1, 2] * 8, max_tokens=20)
    bench.run()
    assert bench.scheduler.stats.num_accepted_tokens < bench.scheduler.stats.num_draft_tokens
    bench.add("second", first.sequences[0].token_ids, max_tokens=20)
    bench.run()
    bench.check_tokens("second")
    assert bench.requests["second"].num_cached_tokens == 32  # all full blocks of the first 35 tokens computed


@pytest.mark.parametrize(
    "given_config",
    [
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 3},
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5, "prompt_lookup_min": 3}',
        {"model": "[ngram]", "num_speculative_tokens": 3, "ngram_prompt_lookup_max": 5, "ngram_prompt_lookup_min": 3},
    ],
)
def test_speculative_config_is_read_as_elsewhere(given_config: object) -> None:
    config = EngineConfig.of(speculative_config=given_config).scheduler
    assert config.speculative_method == "ngram"
    assert (config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3, 5)
    assert EngineConfig.of(speculative_config=None).scheduler.speculative_method == "none"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {"method": "eagle"}}, "ngram"),
        ({"speculative_config": {"draft_model": "x"}}, "draft_model"),
        ({"speculative_config": "ngram"}, "JSON"),
        ({"speculative_config": {"prompt_lookup_max": 3}, "ngram_prompt_lookup_max": 4}, "given twice"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min"),
    ],
)
def test_bad_settings_of_speculation_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**settings)
