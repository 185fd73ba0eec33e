"""Encoders give embeddings: transformers' hidden states, pooled, whatever stands beside a prompt."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from doubles.sentence_model import sentence_model
from doubles.vocabularies import byte_level, write_folder
from safetensors.torch import load_file, save_file

from octavo import LLM, EmbeddingOutput, EngineConfig
from octavo.cli.main import main
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import ConfigError, ModelError, OctavoError, UnsupportedError
from octavo.model.encoder import ENCODERS

TEXTS = [
    "A man is eating food.",
    "hello",
    "The quick brown fox jumps over the lazy dog, and then it sleeps for a very long time under the old oak tree.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "a " * 200,
]
SIZES = {
    "vocab_size": 401,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
# Model type -> names of transformers' config and of its class with a head, and what its config has besides.
TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {"embedding_size": 16}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "camembert": ("CamembertConfig", "CamembertForMaskedLM", {}),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4}),
    "electra": ("ElectraConfig", "ElectraForMaskedLM", {"embedding_size": 16}),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {"local_attention": 8, "global_attn_every_n_layers": 2},
    ),
    "mpnet": ("MPNetConfig", "MPNetForMaskedLM", {}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {}),
    "xlm-roberta": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", {}),
}


def write_encoder(folder: Path, kind: str = "bert", **changes: Any) -> Any:
    """A tiny random encoder with a head of masked tokens on it, as pretrained ones are saved; the model."""
    config_class, model_class, more = TINY[kind]
    config = getattr(transformers, config_class)(**SIZES, **more, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    write_folder(folder, byte_level(add_bos=True), {"bos_token": "<s>", "eos_token": "</s>"})
    return model


def right(model: Any, token_ids: Sequence[int], pooling: str) -> torch.Tensor:
    """The embedding of one prompt by itself."""
    with torch.no_grad():
        hidden = model.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0]
    vector = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
    return vector / vector.norm()


def check(model: Any, outputs: Sequence[EmbeddingOutput], pooling: str = "mean") -> None:
    for output in outputs:
        assert output.error is None and output.embedding is not None
        vector = torch.tensor(output.embedding)
        torch.testing.assert_close(vector, right(model, output.prompt_token_ids, pooling), atol=2e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bert")
    return folder, write_encoder(folder)


MakeEncoder = Callable[..., LLM]


@pytest.fixture
def make(bert: tuple[Path, Any]):
    made: list[LLM] = []

    def make(folder: Path | None = None, **settings: Any) -> LLM:
        made.append(LLM(folder or bert[0], dtype="float32", num_threads=1, **settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


# The sentence model


def test_the_sentence_model_gives_what_its_makers_library_does() -> None:
    """modules.json says: the mean of what is no padding, normalised; that is computed here by transformers alone."""
    folder = sentence_model()
    steps = [step["type"].rpartition(".")[2] for step in json.loads((folder / "modules.json").read_text())]
    assert steps == ["Transformer", "Pooling", "Normalize"]
    assert json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"] is True
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(folder)(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    truth = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    with LLM(folder, num_threads=1) as llm:
        assert llm.config.model.max_model_len == 256
        outputs = llm.embed(TEXTS)
        long, short = llm.embed(["word " * 300, "word"])
    for output, own, ids in zip(outputs, truth, batch["input_ids"], strict=True):
        assert output.prompt_token_ids == [i for i in ids.tolist() if i != tokenizer.pad_token_id]
        assert torch.tensor(output.embedding) @ own > 1 - 1e-6
    assert long.error is not None and "the prompt has 302 tokens and max_model_len is 256" in long.error
    assert short.error is None
    near, far = llm_cosines(outputs)
    assert near < far


def llm_cosines(outputs: Sequence[EmbeddingOutput]) -> tuple[float, float]:
    """The cosine of the food sentence with the repeated letter, and with itself."""
    first, *_, last = (torch.tensor(output.embedding) for output in outputs)
    return float(first @ last), float(first @ first)


# Families


def test_every_encoder_has_its_test() -> None:
    assert set(TINY) == set(ENCODERS)


@pytest.mark.parametrize("kind", TINY)
def test_each_family_gives_transformers_states(kind: str, tmp_path: Path, make: MakeEncoder) -> None:
    model = write_encoder(tmp_path, kind)
    llm = make(tmp_path)
    longest = 64 if ENCODERS[kind] else 66
    assert llm.config.model.max_model_len == longest
    prompts = [[3 + (i * 7) % 390 for i in range(n)] for n in (1, 2, 9, 30, longest)]
    for pooling in ("mean", "last", "cls"):
        check(model, llm.embed([{"prompt_token_ids": ids} for ids in prompts], pooling), pooling)


# The engine


def test_prompts_of_all_lengths_come_in_steps_of_the_budget(bert: tuple[Path, Any], make: MakeEncoder) -> None:
    llm = make(max_num_batched_tokens=64, max_num_seqs=8)
    encode, sizes = llm._engine._encoder.hidden, []

    def watched(prompts):
        sizes.append((len(prompts), max(map(len, prompts))))
        return encode(prompts)

    llm._engine._encoder.hidden = watched
    prompts = [[3 + (i * 7 + n) % 390 for i in range(1 + n * 13 % 60)] for n in range(40)]
    outputs = llm.embed([{"prompt_token_ids": ids} for ids in prompts])
    assert [output.prompt_token_ids for output in outputs] == prompts
    check(bert[1], outputs)
    assert all(num <= 8 and (num == 1 or num * longest <= 64) for num, longest in sizes)
    assert max(num for num, _ in sizes) > 1
    assert llm.stats.counts.num_steps == len(sizes)
    assert llm.stats.counts.num_prompt_tokens == sum(map(len, prompts))
    assert not llm._engine.has_work and not len(llm._outputs)


def test_the_more_urgent_go_first(make: MakeEncoder) -> None:
    llm = make(scheduling_policy="priority", max_num_seqs=1)
    encode, order = llm._engine._encoder.hidden, []

    def watched(prompts):
        order.extend(ids[0] for ids in prompts)
        return encode(prompts)

    llm._engine._encoder.hidden = watched
    llm.embed([{"prompt_token_ids": [10 + i]} for i in range(4)], priority=[2, 0, 1, 0])
    assert order == [11, 13, 12, 10]


def test_who_makes_the_model_fail_fails_alone(bert: tuple[Path, Any], make: MakeEncoder) -> None:
    llm = make()
    encode = llm._engine._encoder.hidden

    def failing(prompts):
        if any(ids[0] == 9 for ids in prompts):
            raise ValueError("out of luck")
        return [
            torch.full_like(h, torch.nan) if ids[0] == 8 else h for ids, h in zip(prompts, encode(prompts), strict=True)
        ]

    llm._engine._encoder.hidden = failing
    prompts = [[5, 6], [9, 6], [8, 7], [7, 7, 7]]
    first, failed, no_number, last = llm.embed([{"prompt_token_ids": ids} for ids in prompts])
    check(bert[1], [first, last])
    assert failed.error == "the model failed: ValueError: out of luck"
    assert no_number.error == "the model gave hidden states that are not numbers"
    assert failed.embedding is no_number.embedding is None


def test_an_interrupted_step_leaves_nothing_behind(bert: tuple[Path, Any], make: MakeEncoder) -> None:
    llm = make()
    encode = llm._engine._encoder.hidden

    def interrupted(prompts):
        raise KeyboardInterrupt

    llm._engine._encoder.hidden = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.embed(TEXTS[:2])
    assert not llm._engine.has_work and not len(llm._outputs)
    llm._engine._encoder.hidden = encode
    check(bert[1], llm.embed(TEXTS[:2]))


def test_bad_prompts_fail_alone(bert: tuple[Path, Any], make: MakeEncoder) -> None:
    llm = make()
    long = {"prompt_token_ids": [5] * 67}
    first, unknown, too_long, last = llm.embed(["hello", {"prompt_token_ids": [401]}, long, "you"])
    check(bert[1], [first, last])
    assert unknown.error is not None and "token ids are integers from 0 to 400" in unknown.error
    assert too_long.error is not None and "the prompt has 67 tokens and max_model_len is 66" in too_long.error


def test_a_prompt_has_a_timeline_and_its_tokens_count(bert: tuple[Path, Any]) -> None:
    async def test() -> None:
        config = EngineConfig.of(model=str(bert[0]), dtype="float32", num_threads=1, max_num_seqs=1)
        engine = await AsyncEngine.start(config)
        try:
            profile = asyncio.create_task(engine.profile(2, 60))
            prompts = [[5] * 9, [6] * 4]
            await asyncio.gather(
                *(engine.embed({"prompt_token_ids": ids}, request_id=str(i)) for i, ids in enumerate(prompts))
            )
            for i, prompt in enumerate(prompts):
                timeline = engine.timeline(str(i))
                assert timeline is not None
                events = {event["event"]: event["detail"] for event in timeline["events"]}
                assert list(events) == ["received", "tokenised", "queued", "admitted", "chunk", "finished"]
                assert events["admitted"] == "1 prompts side by side; an encoder has no prefix cache"
                assert events["chunk"] == f"{len(prompt)} tokens, all of its prompt"
                assert (timeline["finish_reason"], timeline["num_prompt_done"]) == ("stop", len(prompt))
            totals = engine.history.totals
            assert totals["num_prompt_tokens"] == totals["num_computed_prompt_tokens"] == 13
            assert (totals["num_computed_tokens"], totals["num_admitted"]) == (13, 2)
            steps = (await profile).steps
            assert [step.num_tokens for step in steps] == [9, 4]
            for step in steps:
                assert [phase for phase, _ in step.marks] == ["schedule", "program", "update", "send"]
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(test(), 120))


# Refusals


def one_line(error: OctavoError) -> str:
    text = str(error)
    assert "\n" not in text and len(text) < 600
    return text


def test_an_encoder_generates_nothing(bert: tuple[Path, Any], make: MakeEncoder, capsys) -> None:
    llm = make()
    said = "is an encoder (bert): it gives embeddings (LLM.embed) and generates no text"
    message = [{"role": "user", "content": "hello"}]
    for call in (
        lambda: llm.generate("hello"),
        lambda: llm.chat(message),
        lambda: next(llm.stream("hello")),
        lambda: next(llm.stream_chat(message)),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert said in one_line(caught.value)
    assert main(["generate", str(bert[0]), "hello", "--num-threads", "1"]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("octavo generate: error: ") and said in error[0]


def test_info_says_who_runs_it(bert: tuple[Path, Any], capsys) -> None:
    assert main(["info", "--model", str(bert[0]), "--num-threads", "1"]) == 0
    printed = capsys.readouterr().out
    assert "transformers' BertModel, whole prompts at once, for embeddings alone" in printed
    assert main(["info", "--model", str(bert[0]), "--num-threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["settings"]["max_model_len"] == 66 and report["ops"] is None


def test_what_its_settings_cannot_have(bert: tuple[Path, Any]) -> None:
    with pytest.raises(UnsupportedError, match="is an encoder, which runs through transformers: set model_impl to hf"):
        LLM(bert[0], model_impl="native")
    with pytest.raises(ConfigError, match="deterministic is set, and an encoder's rows depend on their batch mates"):
        LLM(bert[0], deterministic=True)
    with pytest.raises(ConfigError, match="max_model_len is 67, and the model was made for 66 positions"):
        LLM(config=EngineConfig().but(model=str(bert[0]), max_model_len=67))


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda t: t.pop("bert.encoder.layer.1.output.dense.weight"),
            "tensor encoder.layer.1.output.dense.weight is missing",
        ),
        (
            lambda t: t.update({"bert.encoder.layer.0.output.dense.bias": torch.zeros(31)}),
            "tensor encoder.layer.0.output.dense.bias has shape [31], expected is [32]",
        ),
        (
            lambda t: t.update({"bert.encoder.layer.2.output.dense.bias": torch.zeros(32)}),
            "encoder.layer.2.output.dense.bias has no place",
        ),
    ],
    ids=["missing", "shape", "extra"],
)
def test_weights_of_another_model(tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], None], said: str) -> None:
    write_encoder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        LLM(tmp_path)
    assert said in one_line(caught.value) and str(tmp_path) in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    write_encoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="BertModel cannot be loaded") as caught:
        LLM(tmp_path)
    one_line(caught.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no safetensors"):
        LLM(tmp_path)
    with LLM(tmp_path, load_format="dummy", num_threads=1) as llm:
        assert all(output.error is None for output in llm.embed(TEXTS[:2]))
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match="must hold an array"):
        LLM(tmp_path)
