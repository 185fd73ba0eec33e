"""A decoder's embeddings are its own hidden states, pooled, whatever was cached, cut, preempted or beside them."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doubles.tiny_llm import Oracle, greedy, write_tiny_llm
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file

from octavo import LLM, EmbeddingOutput
from octavo.errors import ModelError, RequestError, UnsupportedError
from octavo.model.files import ModelFiles
from octavo.model.sentence import own_pooling
from octavo.pooling_params import PoolingParams
from octavo.scheduler.messages import HiddenSum
from octavo.scheduler.pooling import Pool

POOLINGS = ("mean", "last", "cls")
GOOD = "The quick brown fox"


def prompt(length: int, seed: int = 0) -> list[int]:
    return [4 + (i * 37 + 11 * seed) % 390 for i in range(length)]


def given(prompts: Sequence[Sequence[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": list(ids)} for ids in prompts]


def pooled(hidden: torch.Tensor, pooling: str, normalize: bool = True) -> torch.Tensor:
    """The right embedding from hidden states [T, H]."""
    vector = {"mean": hidden.double().mean(0), "last": hidden[-1].double(), "cls": hidden[0].double()}[pooling]
    return vector / vector.norm() if normalize else vector


def check(oracle: Oracle, outputs: Sequence[EmbeddingOutput], pooling: str, normalize: bool = True) -> None:
    for output in outputs:
        assert output.error is None and output.finished and output.embedding is not None
        assert output.num_prompt_tokens == len(output.prompt_token_ids) > 0
        right = pooled(oracle.hidden(output.prompt_token_ids), pooling, normalize)
        torch.testing.assert_close(torch.tensor(output.embedding).double(), right, atol=1e-5, rtol=1e-4)


def check_idle(llm: LLM) -> None:
    llm._engine.step()
    assert not llm._engine.has_work and not len(llm._outputs) and not llm._news
    llm._engine.scheduler.check()
    assert llm.stats.num_used_blocks == 0


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_transformers_hidden_states_pooled(tiny: LLM, oracle: Oracle, pooling, normalize: bool) -> None:
    outputs = tiny.embed(given([prompt(n, n) for n in (1, 2, 15, 16, 17, 90)]), pooling, normalize)
    check(oracle, outputs, pooling, normalize)
    (text,) = tiny.embed(GOOD, pooling, normalize)
    assert (text.prompt, text.prompt_token_ids) == (GOOD, tiny.tokenizer.encode(GOOD))
    check(oracle, [text], pooling, normalize)
    check_idle(tiny)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunks_change_nothing(make_llm, oracle: Oracle, pooling) -> None:
    llm = make_llm(max_num_batched_tokens=17, max_num_seqs=4, enable_prefix_caching=False)
    outputs = llm.embed(given([prompt(n, n) for n in (100, 1, 17, 18, 34, 61)]), pooling)
    check(oracle, outputs, pooling)
    assert llm.stats.counts.num_steps > 10
    check_idle(llm)


def test_what_is_cached_has_no_hidden_states(make_llm, oracle: Oracle) -> None:
    llm = make_llm(block_size=8)
    ids = given([prompt(50)])
    llm.generate(ids, greedy(2))
    for pooling, num_cached in (("mean", 0), ("cls", 0), ("last", 48)):
        outputs = llm.embed(ids, pooling)
        check(oracle, outputs, pooling)
        assert [output.num_cached_tokens for output in outputs] == [num_cached]
    llm.reset_prefix_cache()
    llm.embed(ids, "mean")
    (after,) = llm.generate(ids, greedy(2))
    assert after.num_cached_tokens == 48


@pytest.mark.parametrize("mode", [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_space": 0.01}])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_preemption_within_a_prompt_changes_nothing(make_llm, oracle: Oracle, pooling, mode: dict[str, Any]) -> None:
    llm = make_llm(max_num_batched_tokens=24, num_blocks_override=16, max_model_len=128, max_num_seqs=4, **mode)
    prompts = [prompt(100, seed) for seed in range(4)]
    outputs = llm.embed(given(prompts), pooling)
    assert llm.stats.counts.num_preemptions > 0
    assert (llm.stats.counts.num_swaps > 0) == (mode["preemption_mode"] == "swap")
    check(oracle, outputs, pooling)
    check_idle(llm)


def test_embeddings_and_texts_share_steps(make_llm, oracle: Oracle) -> None:
    llm = make_llm(max_num_batched_tokens=32)
    prompts = [prompt(40, seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        texts = pool.submit(llm.generate, given(prompts), greedy(10))
        vectors = {pooling: pool.submit(llm.embed, given(prompts), pooling) for pooling in ("mean", "last")}
    for output in texts.result():
        oracle.check_greedy(output.prompt_token_ids, output.outputs[0].token_ids)
    for pooling, found in vectors.items():
        check(oracle, found.result(), pooling)
    check_idle(llm)


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt has no tokens"),
        ({"prompt_token_ids": [401]}, "prompt holds 401; token ids are integers from 0 to 400"),
        (None, "got NoneType"),
        ({"prompt_token_ids": [9] * 513}, "the prompt has 513 tokens and max_model_len is 512"),
    ],
)
def test_a_bad_prompt_fails_alone(tiny: LLM, oracle: Oracle, bad: Any, rule: str) -> None:
    first, wrong, last = tiny.embed([GOOD, bad, GOOD])
    check(oracle, [first, last], "mean")
    assert wrong.embedding is None and wrong.finished
    assert wrong.error is not None and rule in wrong.error and "\n" not in wrong.error
    check_idle(tiny)


def test_the_longest_prompt_is_one_of_the_models_length(tiny: LLM, oracle: Oracle) -> None:
    check(oracle, tiny.embed(given([prompt(512)])), "mean")


def test_no_prompts_and_wrong_poolings(tiny: LLM) -> None:
    assert tiny.embed([]) == []
    with pytest.raises(RequestError, match="pooling is one of mean, last, cls, got 'max'"):
        tiny.embed(GOOD, "max")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="normalize is true or false, got 1"):
        tiny.embed(GOOD, normalize=1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 prompts and 2 priorities"):
        tiny.embed(GOOD, priority=[1, 2])


def test_a_failed_step_counts_no_state_twice(make_llm, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(max_num_batched_tokens=24)
    execute, calls = llm.executor.execute_model, []

    def failing(step):
        calls.append(step)
        result = execute(step)
        if len(calls) == 2:
            raise ValueError("out of luck")
        return result

    monkeypatch.setattr(llm.executor, "execute_model", failing)
    check(oracle, llm.embed(given([prompt(60, seed) for seed in range(3)])), "mean")
    assert llm.stats.counts.num_failed_steps == 1 and llm.stats.counts.num_recomputed_tokens > 0
    check_idle(llm)


def test_states_that_are_no_numbers_fail_alone(make_llm, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    program = llm.executor._worker._runner._program
    submit = program.submit

    def spoilt(batch, rows):
        output = submit(batch, rows).result()
        output.hidden[batch.token_ids[torch.from_numpy(rows.index)] == 399] = torch.nan
        return SimpleNamespace(result=lambda: output)

    monkeypatch.setattr(program, "submit", spoilt)
    first, bad, last = llm.embed(given([[5, 6, 7], [5, 399, 7], [8, 9]]))
    check(oracle, [first, last], "mean")
    assert (bad.error, bad.embedding) == ("the model gave hidden states that are not numbers", None)


def test_what_ends_early_has_an_error(make_llm) -> None:
    llm = make_llm(max_num_batched_tokens=17)
    step = llm._engine.step

    def aborted():
        updates = step()
        llm._engine.abort(["1"])
        return updates

    llm._engine.step = aborted
    first, second = llm.embed(given([prompt(40), prompt(41)]))
    assert first.error is None and first.embedding is not None
    assert (second.error, second.embedding) == ("it was ended before all of the prompt was computed", None)
    check_idle(llm)


# What a model's files say


def write_steps(folder: Path, *steps: str, **pooling: Any) -> None:
    modules = [
        {"idx": i, "path": f"{i}_{step}" if i else "", "type": f"some.models.{step}"} for i, step in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def files(folder: Path) -> ModelFiles:
    return ModelFiles(str(folder), "folder", folder, folder)


def test_unset_the_pooling_is_the_models_own(tmp_path: Path, make_llm) -> None:
    oracle = write_tiny_llm(tmp_path)
    llm = make_llm(tmp_path)
    check(oracle, llm.embed(GOOD), "mean")
    write_steps(
        tmp_path, "Transformer", "Pooling", "Normalize", pooling_mode_lasttoken=True, pooling_mode_cls_token=False
    )
    check(oracle, llm.embed(GOOD), "last")
    check(oracle, llm.embed(GOOD, "cls"), "cls")
    write_steps(tmp_path, "Transformer", "Pooling", "Dense", pooling_mode="mean")
    with pytest.raises(
        UnsupportedError, match="a step of type Dense makes the embedding; known are Transformer, Pooling"
    ):
        llm.embed(GOOD)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_max_tokens": True}, "pooling by max; known are mean, lasttoken, cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pooling by mean and cls; known"),
        ({}, "pooling by nothing; known"),
    ],
)
def test_poolings_of_folders(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    write_steps(tmp_path, "Transformer", "Pooling", **config)
    if found in POOLINGS:
        assert own_pooling(files(tmp_path)) == found
    else:
        with pytest.raises(UnsupportedError, match=found):
            own_pooling(files(tmp_path))


@pytest.mark.parametrize(("number", "found"), [(None, None), (0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, "4")])
def test_poolings_of_gguf_files(tmp_path: Path, number: int | None, found: str | None) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "qwen3")
    if number is not None:
        writer.add_uint32("qwen3.pooling_type", number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    model = ModelFiles(str(path), "gguf", path, path)
    if number != 4:
        assert own_pooling(model) == found
    else:
        with pytest.raises(UnsupportedError, match="pooling_type 4; known are 0, 1, 2, 3"):
            own_pooling(model)


# Other decoders


def test_a_decoder_saved_without_its_head_embeds_and_generates_nothing(
    tmp_path: Path, make_llm, oracle: Oracle
) -> None:
    write_tiny_llm(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert tensors.pop("lm_head.weight") is not None
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, path, {"format": "pt"})
    llm = make_llm(tmp_path)
    check(oracle, llm.embed(GOOD), "mean")
    with pytest.raises(UnsupportedError, match="is a decoder saved without its head: it gives embeddings"):
        llm.generate(GOOD)
    save_file(tensors, path, {"format": "pt"})  # under its full names the head is missing
    with pytest.raises(ModelError, match="tensor lm_head is missing"):
        make_llm(tmp_path)


def test_decoders_of_transformers_embed(tmp_path: Path, make_llm, oracle: Oracle) -> None:
    llm = make_llm(model_impl="hf", max_num_batched_tokens=17)
    for pooling in POOLINGS:
        check(oracle, llm.embed(given([prompt(n, n) for n in (40, 1, 17)]), pooling), pooling)


# The pool by itself


def test_a_pool_holds_one_sum_whatever_the_chunks() -> None:
    states = np.random.default_rng(0).normal(size=(1000, 8)).astype(np.float32)
    found = set()
    for chunk in (1, 7, 1000):
        pool = Pool(PoolingParams("mean", normalize=False), 1000)
        for start in range(0, 1000, chunk):
            assert pool.embedding() is None
            part = states[start : start + chunk]
            pool.add(HiddenSum(len(part), part.sum(0, dtype=np.float64)))
            assert pool.left(start + len(part)) == range(start + len(part), 1000)
        found.add(pool.embedding())
    (vector,) = found
    np.testing.assert_allclose(vector, states.mean(0, dtype=np.float64), rtol=1e-6)


def test_a_vector_of_zeros_stays_one() -> None:
    pool = Pool(PoolingParams("last"), 3)
    assert pool.left(0) == range(2, 3) and not pool.needs_whole_prompt
    pool.add(HiddenSum(1, np.zeros(4)))
    assert pool.embedding() == (0.0, 0.0, 0.0, 0.0)
