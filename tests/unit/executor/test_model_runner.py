"""The runner over the fake program: a wrong slot, table, copy or swap would change a token or raise."""

from collections.abc import Sequence

import numpy as np
import pytest
from doubles.fake_executor import FakeExecutor
from doubles.fake_program import ALL_MODES, PoisonError, fake_greedy, fake_logits

from octavo.contract import RowMode
from octavo.executor import model_runner
from octavo.executor import prompts as prompt_rows
from octavo.executor.logprobs import from_logits
from octavo.executor.sampler import Draw, Sampler
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import (
    ModelRunnerOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprobs,
)

VOCAB = 61
GREEDY = SamplingParams(temperature=0)
PROMPT = [5, 3, 8, 1, 40, 22, 9]  # in blocks of 4: one full, one in part
MODES = pytest.mark.parametrize("modes", [ALL_MODES, frozenset((RowMode.LOGITS,))], ids=["all_modes", "logits_only"])


def new(
    seq_id: int,
    token_ids: Sequence[int],
    block_ids: Sequence[int],
    params: SamplingParams = GREEDY,
    sample_index: int = 0,
    num_prompt: int | None = None,
    logprobs_from: int | None = None,
) -> NewSequence:
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    return NewSequence(
        seq_id, sample_index, list(token_ids), num_prompt, params, frozenset((0,)), list(block_ids), logprobs_from
    )


def run(executor: FakeExecutor, *scheduled: ScheduledSequence, **fields: object) -> ModelRunnerOutput:
    return executor.execute_model(SchedulerOutput(0, scheduled, **fields))  # type: ignore[arg-type]


def drawn(result: ModelRunnerOutput) -> dict[int, int]:
    """The one token of each sequence."""
    return {seq_id: token_id for seq_id, (token_id,) in result.token_ids.items()}


def decode(executor: FakeExecutor, seq_id: int, num_known: int, num_steps: int) -> list[int]:
    """Further tokens, one a step, in blocks that the table has already."""
    tokens = []
    for i in range(num_steps):
        item = ScheduledSequence(seq_id, num_known - 1 + i, 1, sample_for=(seq_id,))
        tokens.append(run(executor, item).token_ids[seq_id][0])
    return tokens


def sampled(prompt: Sequence[int], num: int, params: SamplingParams, sample_index: int = 0) -> list[int]:
    """Seeded tokens of the fake model, by the sampler but without any batch."""
    ids = list(prompt)
    for position in range(num):
        token = Sampler(VOCAB).sample([Draw(fake_logits(ids, VOCAB), params, sample_index, position)])[0]
        assert isinstance(token, int)
        ids.append(token)
    return ids[len(prompt) :]


@MODES
@pytest.mark.parametrize("cuts", [[7], [1] * 7, [4, 3], [3, 4], [2, 3, 2]])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(cuts: list[int], modes: frozenset[RowMode]) -> None:
    executor = FakeExecutor(modes=modes, num_groups=2)
    start, fields = 0, {"new": (new(1, PROMPT, [9, 2, 5]),)}
    for size in cuts:
        done = start + size == len(PROMPT)
        result = run(executor, ScheduledSequence(1, start, size, sample_for=(1,) if done else ()), **fields)
        assert done or result.token_ids == {}
        start, fields = start + size, {}
    assert [result.token_ids[1][0], *decode(executor, 1, 8, 4)] == fake_greedy(PROMPT, 5, VOCAB)


def test_blocks_arrive_as_a_sequence_grows() -> None:
    executor, expected = FakeExecutor(), fake_greedy(PROMPT, 8, VOCAB)
    found = [run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [3, 0]),)).token_ids[1][0]]
    for i, blocks in enumerate([(), (7,), (), (), (), (1,), ()]):
        item = ScheduledSequence(1, 7 + i, 1, new_block_ids=blocks, sample_for=(1,))
        found.append(run(executor, item).token_ids[1][0])
    assert found == expected


def test_sequences_side_by_side_come_and_go() -> None:
    executor = FakeExecutor()
    prompts = {1: [1, 2, 3], 2: [4], 3: [5, 6, 7, 8, 9]}
    added = tuple(new(s, p, [4 * s, 4 * s + 1]) for s, p in prompts.items())
    items = [ScheduledSequence(s, 0, len(p), sample_for=(s,)) for s, p in prompts.items()]
    first = run(executor, *items, new=added)
    assert first.token_ids == {s: fake_greedy(p, 1, VOCAB) for s, p in prompts.items()}
    # 2 leaves, 4 takes its blocks, and the order turns round.
    items = [
        ScheduledSequence(3, 5, 1, sample_for=(3,)),
        ScheduledSequence(4, 0, 2, sample_for=(4,)),
        ScheduledSequence(1, 3, 1, sample_for=(1,)),
    ]
    second = run(executor, *items, removed=(2,), new=(new(4, [10, 11], [8, 9]),))
    expected = {s: fake_greedy(prompts[s], 2, VOCAB)[1:] for s in (1, 3)} | {4: fake_greedy([10, 11], 1, VOCAB)}
    assert second.token_ids == expected
    assert executor.runner.num_sequences == 3


def test_forks_draw_from_one_row_with_numbers_of_their_own() -> None:
    params = SamplingParams(n=3, seed=17, temperature=1.5)
    executor = FakeExecutor()
    added = tuple(new(s, PROMPT, [0, 1], params, sample_index=s) for s in range(3))
    first = drawn(run(executor, ScheduledSequence(0, 0, 7, sample_for=(0, 1, 2)), new=added))
    # Samples 1 and 2 write into block 1 in place of sharing it: copy-on-write.
    items = [
        ScheduledSequence(0, 7, 1, sample_for=(0,)),
        ScheduledSequence(1, 7, 1, replaced_blocks=((1, 5),), sample_for=(1,)),
        ScheduledSequence(2, 7, 1, replaced_blocks=((1, 6),), sample_for=(2,)),
    ]
    second = drawn(run(executor, *items, copies=((1, 5), (1, 6))))
    blocks = {0: 10, 1: 11, 2: 12}
    items = [ScheduledSequence(s, 8, 1, new_block_ids=(blocks[s],), sample_for=(s,)) for s in range(3)]
    third = drawn(run(executor, *items))
    for sample in range(3):
        assert [first[sample], second[sample], third[sample]] == sampled(PROMPT, 3, params, sample)
    assert len({tuple(sampled(PROMPT, 3, params, s)) for s in range(3)}) == 3


def test_a_missing_copy_is_seen() -> None:
    executor = FakeExecutor()
    run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1]),))
    with pytest.raises(PoisonError):
        run(executor, ScheduledSequence(1, 7, 1, replaced_blocks=((1, 5),), sample_for=(1,)))


def test_swap_out_and_in_before_the_blocks_are_used_again() -> None:
    params = SamplingParams(seed=5, temperature=0.9)
    executor = FakeExecutor(num_host_blocks=4, num_groups=2)
    first = run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1], params),))
    # 1 leaves for the host while 2 computes in its blocks.
    other = run(
        executor,
        ScheduledSequence(2, 0, 8, sample_for=(2,)),
        removed=(1,),
        new=(new(2, [7] * 8, [1, 0]),),
        swap_out=((0, 3), (1, 2)),
    )
    assert other.token_ids[2][0] == fake_greedy([7] * 8, 1, VOCAB)[0]
    # 2 leaves for the host in the very step in which 1 comes back into its blocks, and one of them is copied on.
    known = [*PROMPT, first.token_ids[1][0]]
    back = run(
        executor,
        ScheduledSequence(1, 7, 1, sample_for=(1,)),
        removed=(2,),
        new=(new(1, known, [9, 0], params, num_prompt=7),),
        swap_out=((1, 0), (0, 1)),
        swap_in=((3, 1), (2, 0)),
        copies=((1, 9),),
    )
    assert [first.token_ids[1][0], back.token_ids[1][0]] == sampled(PROMPT, 2, params)
    again = run(
        executor,
        ScheduledSequence(2, 8, 1, sample_for=(2,)),
        new=(new(2, [7] * 8 + [other.token_ids[2][0]], [5, 6, 7], num_prompt=8),),
        swap_in=((0, 5), (1, 6)),
    )
    assert again.token_ids[2][0] == fake_greedy([7] * 8, 2, VOCAB)[1]


def test_swapping_without_host_blocks_says_what_to_set() -> None:
    executor = FakeExecutor()
    executor.runner._groups = [model_runner.KVGroupCaches(g.backend, g.device) for g in executor.caches]
    with pytest.raises(ValueError, match="swap_space"):
        run(executor, swap_out=((0, 0),))


def test_a_recomputed_sequence_goes_on_where_it_was() -> None:
    params = SamplingParams(seed=9, repetition_penalty=1.4, frequency_penalty=0.5, min_tokens=4)
    executor = FakeExecutor()
    first = run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1, 2], params),))
    whole = [first.token_ids[1][0], *decode(executor, 1, 8, 3)]
    known = PROMPT + whole[:2]
    resumed = new(1, known, [7, 8, 9], params, num_prompt=7)
    item = ScheduledSequence(1, 0, 9, sample_for=(1,))
    third = run(executor, item, removed=(1,), new=(resumed,))
    assert [third.token_ids[1][0], *decode(executor, 1, 10, 1)] == whole[2:]


@MODES
@pytest.mark.parametrize("start", [None, 1, 3])
@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 4], [2, 3, 2]])
def test_prompt_logprobs_in_chunks(cuts: list[int], start: int | None, modes: frozenset[RowMode]) -> None:
    """Entry i is of prompt token i, whichever chunk computed the row before it; the first token has none."""
    executor = FakeExecutor(modes=modes)
    params = SamplingParams(temperature=0, prompt_logprobs=3)
    sequence = new(1, PROMPT, [4, 2], params, logprobs_from=start or 0)
    found: list[TokenLogprobs] = []
    computed, fields = 0, {"new": (sequence,)}
    for size in cuts:
        done = computed + size == len(PROMPT)
        result = run(executor, ScheduledSequence(1, computed, size, sample_for=(1,) if done else ()), **fields)
        found += result.prompt_logprobs.get(1, [])
        computed, fields = computed + size, {}
    expected = [from_logits(fake_logits(PROMPT[:i], VOCAB), PROMPT[i], 3) for i in range(start or 1, len(PROMPT))]
    assert [(f.token_id, f.rank, f.top_ids) for f in found] == [(e.token_id, e.rank, e.top_ids) for e in expected]
    np.testing.assert_allclose([f.logprob for f in found], [e.logprob for e in expected], atol=1e-5)
    np.testing.assert_allclose([f.top_logprobs for f in found], [e.top_logprobs for e in expected], atol=1e-5)
    assert result.token_ids[1][0] == fake_greedy(PROMPT, 1, VOCAB)[0]


@MODES
def test_prompt_logprobs_of_several_beside_others(modes: frozenset[RowMode], monkeypatch: pytest.MonkeyPatch) -> None:
    """Different numbers of alternatives in one step, cut into several program calls where only logits are served."""
    monkeypatch.setattr(prompt_rows, "MAX_PROMPT_LOGITS", 5)
    executor = FakeExecutor(modes=modes)
    prompts = {1: list(range(1, 14)), 2: [3], 3: [9, 8, 7, 6, 5, 4], 4: [2, 4, 6, 8], 5: [11] * 6}
    wanted = {1: 2, 3: 0, 5: 5}
    params = {s: SamplingParams(temperature=0, prompt_logprobs=wanted.get(s)) for s in prompts}
    added = tuple(
        new(s, p, range(4 * s, 4 * s + 4), params[s], logprobs_from=1 if s in wanted else None)
        for s, p in prompts.items()
    )
    items = [ScheduledSequence(s, 0, len(p), sample_for=(s,)) for s, p in prompts.items()]
    result = run(executor, *items, new=added)
    assert result.token_ids == {s: fake_greedy(p, 1, VOCAB) for s, p in prompts.items()}
    assert result.prompt_logprobs.keys() == wanted.keys()
    for seq_id, num_top in wanted.items():
        prompt, found = prompts[seq_id], result.prompt_logprobs[seq_id]
        expected = [from_logits(fake_logits(prompt[:i], VOCAB), prompt[i], num_top) for i in range(1, len(prompt))]
        assert [(f.token_id, f.rank, f.top_ids) for f in found] == [(e.token_id, e.rank, e.top_ids) for e in expected]
    if RowMode.SCORE in modes:
        assert len(executor.program.step_tokens) == 1
    else:
        assert len(executor.program.step_tokens) > 3
        assert sum(executor.program.step_tokens) == sum(map(len, prompts.values()))


def test_prompt_logprobs_do_not_reach_into_the_output() -> None:
    executor = FakeExecutor()
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    resumed = new(1, [*PROMPT, 33, 34], [0, 1, 2], params, num_prompt=7, logprobs_from=6)
    result = run(executor, ScheduledSequence(1, 0, 9, sample_for=(1,)), new=(resumed,))
    assert [entry.token_id for entry in result.prompt_logprobs[1]] == [PROMPT[6]]


def test_logprobs_of_the_output_are_of_the_raw_distribution() -> None:
    executor = FakeExecutor()
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={13: 100.0})
    result = run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1], params),))
    assert result.token_ids[1][0] == 13
    assert result.logprobs[1][0] == from_logits(fake_logits(PROMPT, VOCAB), 13, 2)
    plain = new(2, PROMPT, [2, 3], SamplingParams(temperature=0, logprobs=0))
    result = run(executor, ScheduledSequence(2, 0, 7, sample_for=(2,)), new=(plain,))
    assert (result.logprobs[2][0].rank, result.logprobs[2][0].top_ids) == (1, ())


def test_min_tokens_hold_through_steps() -> None:
    executor = FakeExecutor()
    everything_but_the_end = dict.fromkeys(range(1, VOCAB), -100.0)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(4,), logit_bias=everything_but_the_end)
    result = run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1, 2], params),))
    tokens = [result.token_ids[1][0], *decode(executor, 1, 8, 2)]
    assert not {0, 4} & set(tokens[:2])
    assert tokens[2] == 0


def test_padded_heads_never_give_their_own_ids() -> None:
    executor = FakeExecutor(vocab_size=VOCAB, num_logits=640, max_num_seqs=20)
    prompts = [[i, 1] for i in range(20)]
    added = tuple(new(i, prompt, [i]) for i, prompt in enumerate(prompts))
    result = run(executor, *(ScheduledSequence(i, 0, 2, sample_for=(i,)) for i in range(20)), new=added)
    padded = [fake_logits(prompt, 640) for prompt in prompts]
    assert list(result.token_ids.values()) == [[int(row[:VOCAB].argmax())] for row in padded]
    assert any(row.argmax() >= VOCAB for row in padded)


@MODES
def test_logits_that_are_no_numbers_end_their_sequence_alone(modes: frozenset[RowMode]) -> None:
    executor = FakeExecutor(modes=modes, nan_token=60)
    kinds = {
        1: (PROMPT, GREEDY),
        2: ([1, 60, 2], GREEDY),
        3: ([60], SamplingParams(seed=1, logprobs=1)),
        4: ([2, 60, 3], SamplingParams(temperature=0, prompt_logprobs=1)),
        5: ([9, 9], SamplingParams(seed=1)),
    }
    added = tuple(new(s, p, [2 * s, 2 * s + 1], q, logprobs_from=q.prompt_logprobs) for s, (p, q) in kinds.items())
    items = [ScheduledSequence(s, 0, len(p), sample_for=(s,)) for s, (p, _) in kinds.items()]
    result = run(executor, *items, new=added)
    assert {failure.seq_id for failure in result.failures} == {2, 3, 4}
    assert all("not numbers" in failure.message for failure in result.failures)
    assert result.token_ids.keys() == {1, 5}
    assert not result.prompt_logprobs and not result.logprobs
    assert result.token_ids[1][0] == fake_greedy(PROMPT, 1, VOCAB)[0]


def test_a_step_that_fails_leaves_a_runner_that_goes_on() -> None:
    executor = FakeExecutor()
    params = SamplingParams(seed=3)
    first = run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1], params),))
    executor.program.fail_next = RuntimeError("device lost")
    added = new(2, [1, 2], [4])
    items = [
        ScheduledSequence(1, 7, 1, new_block_ids=(2,), sample_for=(1,)),
        ScheduledSequence(2, 0, 2, sample_for=(2,)),
    ]
    with pytest.raises(RuntimeError, match="device lost"):
        run(executor, *items, new=(added,))
    known = [*PROMPT, first.token_ids[1][0]]
    again = (new(1, known, [3, 5], params, num_prompt=7), new(2, [1, 2], [6]))
    items = [ScheduledSequence(1, 0, 8, sample_for=(1,)), ScheduledSequence(2, 0, 2, sample_for=(2,))]
    result = run(executor, *items, removed=(1, 2), new=again)
    assert [first.token_ids[1][0], result.token_ids[1][0]] == sampled(PROMPT, 2, params)
    assert result.token_ids[2][0] == fake_greedy([1, 2], 1, VOCAB)[0]
    run(executor, removed=(1, 2, 99))
    assert executor.runner.num_sequences == 0


def test_a_step_that_only_forgets_computes_nothing() -> None:
    executor = FakeExecutor()
    run(executor, ScheduledSequence(1, 0, 7, sample_for=(1,)), new=(new(1, PROMPT, [0, 1]),))
    assert run(executor, removed=(1,)) == ModelRunnerOutput()
    assert executor.program.step_tokens == [7]


def test_greedy_rows_are_picked_by_the_program_and_no_others() -> None:
    executor = FakeExecutor()
    asked: list[list[RowMode]] = []
    submit = executor.program.submit

    def listen(batch, rows):  # type: ignore[no-untyped-def]
        asked.append([RowMode(m) for m in rows.mode])
        return submit(batch, rows)

    executor.program.submit = listen  # type: ignore[method-assign]
    kinds = [
        GREEDY,
        SamplingParams(top_k=1),
        SamplingParams(seed=1),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, presence_penalty=0.1),
    ]
    added = tuple(new(i, [i + 1], [i], params) for i, params in enumerate(kinds))
    run(executor, *(ScheduledSequence(i, 0, 1, sample_for=(i,)) for i in range(len(kinds))), new=added)
    assert asked == [[RowMode.GREEDY, RowMode.GREEDY, RowMode.LOGITS, RowMode.LOGITS, RowMode.LOGITS]]


def test_a_program_without_hidden_states_fails_who_wants_them_alone() -> None:
    executor = FakeExecutor()
    wants = NewSequence(0, 0, PROMPT, len(PROMPT), GREEDY, frozenset(), [0, 1], pooled=range(len(PROMPT)))
    items = [ScheduledSequence(0, 0, len(PROMPT)), ScheduledSequence(1, 0, len(PROMPT), sample_for=(1,))]
    result = run(executor, *items, new=(wants, new(1, PROMPT, [2, 3])))
    (failure,) = result.failures
    assert failure.seq_id == 0 and "gives no hidden states to make embeddings of" in failure.message
    assert result.token_ids == {1: fake_greedy(PROMPT, 1, VOCAB)}
