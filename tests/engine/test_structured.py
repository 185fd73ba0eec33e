"""Outputs that must have a form: they have it, whatever happens to them, and nobody else notices."""

import asyncio
import gc
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from doubles.tiny_llm import greedy

from octavo import LLM, SamplingParams, StructuredOutput
from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.text.tools import FORMATS, Tool, ToolParser, strict_calls

from .conftest import MakeLLM

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "near": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "near"],
    "additionalProperties": False,
}
PROMPTS = [[4 + (7 * i + 3 * j) % 250 for j in range(5 + 6 * i)] for i in range(8)]


def params(seed: int, num_tokens: int = 200, **form: Any) -> SamplingParams:
    return SamplingParams(temperature=1, seed=seed, max_tokens=num_tokens, structured=StructuredOutput(**form))


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def check_json(sample: CompletionOutput) -> None:
    """A complete output has the schema; one that was cut has its beginning."""
    if sample.finish_reason == "stop":
        jsonschema.validate(json.loads(sample.text), SCHEMA)
    else:
        assert sample.finish_reason == "length"
        assert sample.text.startswith("{")


def test_outputs_have_their_forms(tiny: LLM) -> None:
    wishes = [
        *(params(seed, json_schema=SCHEMA) for seed in range(4)),
        params(5, regex="[ab]{3,9}-[0-9]{2}"),
        params(6, choice=["first", "second", "third"]),
        params(7, grammar='start: "(" start? ")"'),
        SamplingParams(temperature=0, max_tokens=200, structured=StructuredOutput(json_schema=SCHEMA)),
    ]
    samples = [output.outputs[0] for output in tiny.generate([{"prompt_token_ids": p} for p in PROMPTS], wishes)]
    for sample in (*samples[:4], samples[7]):
        check_json(sample)
    assert sum(sample.finish_reason == "stop" for sample in samples[:4]) >= 2
    assert samples[4].finish_reason == "stop"
    assert re.fullmatch("[ab]{3,9}-[0-9]{2}", samples[4].text)
    assert samples[5].text in ("first", "second", "third")
    if samples[6].finish_reason == "stop":
        assert re.fullmatch(r"\(+\)+", samples[6].text)


def test_every_sample_has_the_form(tiny: LLM) -> None:
    [output] = tiny.generate({"prompt_token_ids": PROMPTS[0]}, params(3, json_schema=SCHEMA).but(n=4))
    assert len({sample.text for sample in output.outputs}) > 1
    for sample in output.outputs:
        check_json(sample)


def test_mates_are_what_they_are_alone(tiny: LLM) -> None:
    """Unconstrained requests beside constrained ones, sampled and greedy, have the tokens they have without."""
    plain = [SamplingParams(temperature=1, seed=9, max_tokens=24, ignore_eos=True), greedy(24)]
    formed = [params(1, 24, json_schema=SCHEMA), params(2, 24, regex="[a-z ]+")]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:4]]
    together = tokens(tiny.generate(prompts, [*plain, *formed]))
    apart = [tokens(tiny.generate(prompt, wish))[0] for prompt, wish in zip(prompts, [*plain, *formed], strict=True)]
    assert together == apart


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_ones_go_on_in_their_form(make_llm: MakeLLM, mode: str) -> None:
    wishes = [params(seed, 60, json_schema=SCHEMA) for seed in range(5)]
    wishes.append(params(9, 60, json_schema=SCHEMA).but(n=2))
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS[:6]]
    expected = tokens(make_llm().generate(prompts, wishes))
    tight = make_llm(num_blocks_override=24, preemption_mode=mode, swap_space=0.01)
    outputs = tight.generate(prompts, wishes)
    assert tight.stats.counts.num_preemptions > 0
    assert tokens(outputs) == expected
    for output in outputs:
        for sample in output.outputs:
            check_json(sample)


def test_the_end_comes_with_the_form(tiny: LLM) -> None:
    """Neither ignore_eos nor min_tokens makes a complete form go on; min_tokens holds where the form can."""
    prompt = {"prompt_token_ids": PROMPTS[1]}
    [ignores] = tiny.generate(prompt, params(1, choice=["stop here"]).but(ignore_eos=True))
    assert (ignores.outputs[0].text, ignores.outputs[0].finish_reason) == ("stop here", "stop")
    [longer] = tiny.generate(prompt, params(1, choice=["stop here"]).but(min_tokens=100))
    assert (longer.outputs[0].text, longer.outputs[0].finish_reason) == ("stop here", "stop")
    [held] = tiny.generate(prompt, params(1, regex="[ab]+").but(min_tokens=30))
    assert len(held.outputs[0].token_ids) >= 30
    [cut] = tiny.generate(prompt, params(1, 4, regex="[ab]{40,}"))
    assert cut.outputs[0].finish_reason == "length"


def test_other_parameters_keep_to_the_form(tiny: LLM) -> None:
    wish = params(4, json_schema=SCHEMA).but(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={7: 5.0}, top_p=0.9, logprobs=3
    )
    [output] = tiny.generate({"prompt_token_ids": PROMPTS[2]}, wish)
    check_json(output.outputs[0])
    assert output.outputs[0].logprobs is not None
    assert len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids)


def test_what_leaves_nothing_fails_alone(tiny: LLM) -> None:
    [nothing, bad, fine] = tiny.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS[:3]],
        [params(1, regex="a+").but(allowed_token_ids=[5]), params(1, regex="("), params(1, 8, regex="a+")],
    )
    assert nothing.error is not None
    assert "no token" in nothing.error
    assert bad.error is not None
    assert "unclosed group" in bad.error
    assert fine.error is None
    assert set(fine.outputs[0].text) == {"a"}


def test_a_form_may_wait_for_the_end_of_reasoning(tiny: LLM) -> None:
    marker = tiny.tokenizer.backend.token_to_id("<|user|>")
    form = StructuredOutput(choice=["answer"], after_token_id=marker)
    wish = SamplingParams(temperature=1, seed=2, max_tokens=100, structured=form, logit_bias={marker: 6.0})
    [output] = tiny.generate({"prompt_token_ids": PROMPTS[3]}, wish)
    ids = output.outputs[0].token_ids
    assert marker in ids
    assert tiny.tokenizer.decode(ids[ids.index(marker) + 1 :]) == "answer"


def test_many_forms_leave_nothing_behind(tiny: LLM) -> None:
    prompts = [{"prompt_token_ids": PROMPTS[i % 8][:6]} for i in range(200)]
    outputs = tiny.generate(prompts, [params(i, 6, regex=f"[ab]{{2}}{i}") for i in range(200)])
    for i, output in enumerate(outputs):
        assert re.fullmatch(f"[ab]{{2}}{i}", output.outputs[0].text)
    del outputs, output
    gc.collect()
    assert len(tiny._grammars) <= 32
    tiny.generate({"prompt_token_ids": PROMPTS[0]}, greedy(2))  # a step tells the runner who is gone
    assert tiny.executor._worker._runner.num_sequences <= 1  # type: ignore[attr-defined]
    assert tiny.stats.num_used_blocks == 0


def test_over_the_engine_process(tiny_folder: Path) -> None:
    """The same tokens as offline, also after the process died; what is no form is refused before it gets there."""
    wishes = [params(seed, 40, json_schema=SCHEMA) for seed in range(3)]
    wishes += [params(5, 40, regex="[ab ]+").but(n=2, min_tokens=30), greedy(40)]
    config = EngineConfig.of(
        model=str(tiny_folder), dtype="float32", num_threads=1, block_size=8, num_blocks_override=128
    )

    async def collect(engine: AsyncEngine, i: int) -> RequestOutput:
        last = None
        killed = i > 0
        async for output in engine.generate({"prompt_token_ids": PROMPTS[i]}, wishes[i]):
            last = output
            if not killed and len(output.outputs[0].token_ids) >= 5:  # one that waited may hold several tokens more
                os.kill(engine.pid, signal.SIGKILL)
                killed = True
        assert last is not None
        return last

    async def test() -> None:
        engine = await AsyncEngine.start(config)
        work = asyncio.gather(*(collect(engine, i) for i in range(5)))
        for form in ({"regex": "("}, {"json_schema": {"type": "nope"}}, {"grammar": "start: nothing"}):
            with pytest.raises(RequestError) as caught:
                async for _ in engine.generate({"prompt_token_ids": PROMPTS[0]}, params(1, **form)):
                    pass
            assert caught.value.param == next(iter(form))
        assert tokens(await work) == expected
        assert engine.num_restarts == 1

        form = StructuredOutput(json_schema=SCHEMA | {"title": "one that was not compiled before"})
        stream = engine.generate(
            {"prompt_token_ids": PROMPTS[0]}, SamplingParams(structured=form, max_tokens=400), request_id="left"
        )
        ending = asyncio.ensure_future(anext(aiter(stream)))
        await asyncio.sleep(0)
        while engine.num_live == 0:
            await asyncio.sleep(0.001)
        await engine.abort(["left"])
        output = await ending
        while not output.finished:
            output = await anext(stream)
        assert output.outputs[0].finish_reason == "abort"
        assert [output async for output in stream] == []
        assert engine.num_live == 0
        await engine.stop()

    with LLM(config=config) as llm:
        expected = tokens(llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS[:5]], wishes))
    asyncio.run(asyncio.wait_for(test(), 120))


@pytest.mark.parametrize("strict", [False, True])
def test_a_call_that_the_model_begins_is_held_where_its_tool_is_strict(demo: LLM, strict: bool) -> None:
    """The model is shown calls with a field that the schema has not, and goes on in the same way as far as it may."""
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    tools = [Tool("get_weather", {**schema, "additionalProperties": False}, strict)]
    shown = '<tool_call>\n{"name": "get_weather", "arguments": {"town": "%s"}}\n</tool_call>'
    messages = []
    for town in ("Oslo", "Bern", "Lima", "Cairo"):
        messages += [{"role": "user", "content": f"weather {town}"}, {"role": "assistant", "content": shown % town}]
    messages.append({"role": "user", "content": "weather Quito"})
    form = strict_calls(FORMATS["hermes"], tools, reasoning=None, begins_inside=False)
    assert (form is not None) == strict
    [output] = demo.chat(messages, SamplingParams(temperature=0, max_tokens=80, structured=form))  # type: ignore[arg-type]
    [sample] = output.outputs
    parser = ToolParser(FORMATS["hermes"], ["get_weather"])
    parts = parser.add(sample.text).calls + parser.finish().calls
    arguments = json.loads("".join(part.arguments for part in parts))
    assert sample.finish_reason == "stop"
    if strict:
        jsonschema.validate(arguments, tools[0].parameters)
    else:
        assert arguments == {"town": "Quito"}
