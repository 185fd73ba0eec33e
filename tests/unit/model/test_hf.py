"""Models of transformers with paged attention: their logits, what is refused, and who is asked to run what."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from doubles.hf_models import HF_CASES, tiny
from doubles.paged_program import CPU, Paged
from doubles.tiny_models import Tiny, base, folder_files, gguf_files, reference_logits

from octavo.contract import RowMode, Rows, StepOutput
from octavo.errors import ModelError, UnsupportedError
from octavo.model.describe import describe_model
from octavo.model.description import HfModel, NativeModel
from octavo.model.hf import load_hf
from octavo.model.hf_describe import describe_hf

from .harness import compare


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """More are slower on tensors of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def describe(folder: Path, max_model_len: int = 64) -> HfModel:
    return describe_hf(folder_files(folder), max_model_len)


@pytest.mark.parametrize("case", HF_CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Whole, in chunks of 17 and batched."""
    model = HF_CASES[case].save(tmp_path)
    compare(Paged(describe(tmp_path)), model, lengths=(40, 19, 33))


def test_layers_of_one_geometry_share_a_group(tmp_path: Path) -> None:
    HF_CASES["gemma3_text"].save(tmp_path)
    description = describe(tmp_path)
    assert [layer.attention.window for layer in description.layers] == [12, None, 12]
    assert {layer.attention.scale for layer in description.layers} == {48**-0.5}
    assert [group.layers for group in Paged(description).groups] == [(0, 2), (1,)]


def test_values_narrower_than_keys_are_filled_up(tmp_path: Path) -> None:
    HF_CASES["minicpm3"].save(tmp_path)
    layer = describe(tmp_path).layers[0]
    assert (layer.query_size, layer.value_size, layer.attention.head_size) == (24, 12, 24)


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Paged, Any]:
    """A model whose forward caps its logits."""
    folder = tmp_path_factory.mktemp("capped")
    model = tiny("Gemma2", head_dim=16, final_logit_softcapping=3.0).save(folder)
    return Paged(describe(folder)), model


def test_a_step_gives_what_its_rows_ask_for(capped: tuple[Paged, Any]) -> None:
    paged, model = capped
    token_ids = [(7 * i) % 160 for i in range(30)]
    logits = reference_logits(model, token_ids)
    sequence = paged.begin(token_ids)
    modes = [RowMode.HIDDEN, RowMode.GREEDY, RowMode.LOGITS, RowMode.SCORE, RowMode.TOPK]
    rows = Rows(np.array([29, 29, 3, 3, 8]), np.array(modes, np.uint8), 3, np.array([0, 0, 0, 11, 0]))
    out = paged.program.submit(paged.batch([(sequence, 30)]), rows).result()
    paged.end(sequence)
    assert paged.program.modes == frozenset(RowMode)
    assert out.greedy_ids is not None
    assert out.greedy_ids.tolist() == [int(logits[29].argmax())]
    assert out.logits is not None
    torch.testing.assert_close(out.logits, logits[[3]], atol=1e-4, rtol=1e-4)
    assert out.target_logprobs is not None
    np.testing.assert_allclose(out.target_logprobs, [logits[3].log_softmax(-1)[11]], rtol=1e-4)
    assert out.topk_ids is not None
    assert out.topk_ids.tolist() == [logits[8].topk(3).indices.tolist()]
    with torch.no_grad():
        hidden = model.model(torch.tensor([token_ids])).last_hidden_state[0, 29:]
    assert out.hidden is not None
    torch.testing.assert_close(out.hidden, hidden, atol=1e-4, rtol=1e-4)


def test_a_step_without_rows_only_fills_the_cache(capped: tuple[Paged, Any]) -> None:
    paged, model = capped
    token_ids = [(11 * i) % 160 for i in range(30)]
    sequence = paged.begin(token_ids)
    nothing = Rows(np.zeros(0, np.int64), np.zeros(0, np.uint8))
    assert paged.program.submit(paged.batch([(sequence, 20)]), nothing).result() == StepOutput()
    torch.testing.assert_close(
        paged.step([(sequence, 10)])[0], reference_logits(model, token_ids)[20:], atol=1e-4, rtol=1e-4
    )
    paged.end(sequence)


def test_rows_depend_on_their_batch_mates_and_it_says_why(capped: tuple[Paged, Any]) -> None:
    answer = capped[0].program.row_invariant
    assert not answer
    assert "torch's linear" in str(answer)


def test_the_workspace_grows_with_tokens_and_rows(capped: tuple[Paged, Any]) -> None:
    program = capped[0].program
    assert program.workspace_bytes(2048, 4) > program.workspace_bytes(16, 4) < program.workspace_bytes(16, 8)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    "model",
    [
        Tiny("Phi3", base(rope_parameters=LONGROPE, original_max_position_embeddings=32)),
        Tiny(
            "Llama",
            base(
                rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
                max_position_embeddings=32,
            ),
        ),
    ],
    ids=["longrope", "dynamic"],
)
def test_rope_scalings_follow_max_model_len_and_not_the_batch(model: Tiny, tmp_path: Path) -> None:
    """As in our own programs, whose spec is made for one length."""
    model.save(tmp_path)
    texts = [[(7 * i + n) % 160 for i in range(n)] for n in (48, 12)]
    for max_model_len in (20, 64):
        ours = Paged(describe_model(folder_files(tmp_path), max_model_len), max_model_len=max_model_len)
        theirs = Paged(describe(tmp_path, max_model_len), max_model_len=max_model_len)
        sequences = [theirs.begin(text[:max_model_len]) for text in texts]
        found = theirs.step([(sequence, len(sequence.token_ids)) for sequence in sequences])
        for sequence, logits in zip(sequences, found, strict=True):
            torch.testing.assert_close(logits, ours.whole(sequence.token_ids), atol=1e-4, rtol=1e-4)


# Who runs what


def test_auto_takes_a_family_where_there_is_one(tmp_path: Path) -> None:
    Tiny("Llama", base()).save(tmp_path / "llama")
    Tiny("Persimmon", base(num_key_value_heads=...)).save(tmp_path / "persimmon")
    llama, persimmon = folder_files(tmp_path / "llama"), folder_files(tmp_path / "persimmon")
    assert isinstance(describe_model(llama, 64, "auto"), NativeModel)
    assert isinstance(describe_model(llama, 64, "hf"), HfModel)
    assert isinstance(describe_model(persimmon, 64, "auto"), HfModel)
    with pytest.raises(UnsupportedError, match="'persimmon' is not supported, supported are"):
        describe_model(persimmon, 64, "native")


def test_a_broken_model_of_a_family_is_not_taken_elsewhere(tmp_path: Path) -> None:
    Tiny("Llama", base()).save(tmp_path)
    edit_config(tmp_path, num_attention_heads="four")
    with pytest.raises(ModelError, match="no llama model") as found:
        describe_model(folder_files(tmp_path), 64, "auto")
    assert not isinstance(found.value, UnsupportedError)


def test_facts_of_the_config(tmp_path: Path) -> None:
    tiny("Persimmon", bos_token_id=1, eos_token_id=2).save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5], "top_p": 0.8}))
    edit_config(tmp_path, dtype="bfloat16")
    description = describe(tmp_path)
    assert description.architecture == "persimmon"
    assert description.class_name == "PersimmonForCausalLM"
    assert (description.vocab_size, description.max_position) == (400, 256)
    assert (description.eos_token_ids, description.bos_token_id) == (frozenset({2, 5}), 1)
    assert description.sampling_defaults == {"top_p": 0.8}
    assert description.dtype == torch.bfloat16
    assert description.num_parameters == sum(p.numel() for p in load(description).parameters())


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    HF_CASES["persimmon"].config().save_pretrained(tmp_path)
    one, same, other = (load(describe(tmp_path), seed_dummy=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(weight, same[name]) for name, weight in one.items())
    assert not all(torch.equal(weight, other[name]) for name, weight in one.items())


def load(description: HfModel, **settings: Any) -> torch.nn.Module:
    return load_hf(description, dtype=torch.float32, device=CPU, max_model_len=64, progress=False, **settings)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# Refusals


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.FalconConfig(), "FalconForCausalLM does not call attention through"),
        (transformers.BloomConfig(), "BloomForCausalLM does not call attention through"),
        (transformers.MptConfig(), "MptForCausalLM does not call attention through"),
        (transformers.GPTNeoConfig(), "GPTNeoForCausalLM does not call attention through"),
        (transformers.MambaConfig(), "MambaForCausalLM keeps a recurrent state"),
        (transformers.RwkvConfig(), "RwkvForCausalLM keeps a recurrent state"),
        (transformers.JambaConfig(), "JambaForCausalLM keeps a recurrent state"),
        (transformers.Qwen3NextConfig(), "Qwen3NextForCausalLM keeps a recurrent state"),
        (transformers.T5Config(), r"an encoder-decoder \(t5\)"),
        (transformers.BartConfig(), r"an encoder-decoder \(bart\)"),
        (transformers.BertConfig(num_hidden_layers=1), "has a mask that is not causal"),
        (transformers.ViTConfig(), "no causal language model of type 'vit'"),
        (transformers.DeepseekV32Config(num_hidden_layers=1), "gives attention indices"),
        (
            transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            "layers of type conv keep a state",
        ),
        (transformers.MiniMaxConfig(layer_types=["linear_attention"] * 32), "layers of type linear_attention keep"),
        (transformers.Llama4TextConfig(num_hidden_layers=1), "a mask that depends on more than positions"),
        (transformers.DiffLlamaConfig(num_hidden_layers=2), "4 calls of attention in 2 layers"),
        (transformers.DogeConfig(num_hidden_layers=2), "makes its own mask"),
        (transformers.PersimmonConfig(hidden_size=63), "its forward cannot be foreseen"),
        (transformers.PersimmonConfig(quantization_config={"quant_method": "gptq"}), "quantised by gptq"),
    ],
    ids=lambda value: value.model_type if isinstance(value, transformers.PretrainedConfig) else "",
)
def test_what_cannot_run_is_refused_before_weights_are_read(
    config: transformers.PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with pytest.raises(UnsupportedError, match=reason) as found:
        describe(tmp_path)
    assert "\n" not in str(found.value)
    assert str(found.value).startswith(str(tmp_path / "config.json"))


def test_code_of_a_models_own_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('code of the model ran')")
    own = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_kind", "auto_map": own}))
    with pytest.raises(UnsupportedError, match="'own_kind' needs code of its own, and no model's own code is run"):
        describe(tmp_path)


def test_a_type_that_nobody_knows_is_refused_with_both_reasons(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_kind"}))
    with pytest.raises(UnsupportedError, match=r"'own_kind' is not supported.*nor does it run through transformers"):
        describe_model(folder_files(tmp_path), 64, "auto")


def test_gguf_files_run_natively(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="GGUF files run natively"):
        describe_model(gguf_files(tmp_path / "model.gguf"), 64, "hf")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        describe(tmp_path)


def test_a_tensor_too_few_or_too_many_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    HF_CASES["persimmon"].save(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.mlp.dense_h_to_4h.weight"
    changed = {
        f"missing 1: {name}": {k: v for k, v in weights.items() if k != name},
        "without a place in it 1: model.extra": weights | {"model.extra": torch.zeros(2)},
        f"of another shape 1: {name} is [3, 5], expected is [96, 64]": weights | {name: torch.zeros(3, 5)},
    }
    for what, tensors in changed.items():
        save_file(tensors, path, {"format": "pt"})
        with pytest.raises(ModelError) as found:
            load(describe(tmp_path))
        assert what in str(found.value)
        assert "\n" not in str(found.value)
    path.unlink()
    with pytest.raises(ModelError, match="has no safetensors"):
        load(describe(tmp_path))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + x.roll(1, -2),  # of the token before, be it another's
        lambda x: x + x.mean(-2, keepdim=True),
    ],
)
def test_tokens_that_meet_outside_of_attention_are_found(
    mix: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HF_CASES["llama"].save(tmp_path)
    description = describe(tmp_path)
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    plain = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: plain(self, mix(x)))
    with pytest.raises(UnsupportedError, match="something else than attention mixes the tokens of a batch"):
        Paged(description)


def test_a_layer_that_changes_its_mind_is_stopped(tmp_path: Path) -> None:
    HF_CASES["llama"].save(tmp_path)
    paged = Paged(describe(tmp_path))
    for layer in paged.program._body.__self__.layers:  # type: ignore[attr-defined]
        layer.self_attn.scaling = 1.0
    with pytest.raises(RuntimeError, match="foreseen was"):
        paged.whole([1, 2, 3])
