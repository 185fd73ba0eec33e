"""The native decoder against the generic program on the reference ops; a row alone, in company and in chunks."""

from pathlib import Path

import numpy as np
import pytest
import torch
from doubles.family_cases import CASES
from doubles.paged_program import Paged
from doubles.tiny_models import Tiny, base, folder_files

from octavo.contract import QuantizedWeight, RowMode, Rows
from octavo.model.describe import describe_native, load_weights
from octavo.model.description import NativeModel
from octavo.model.quantize import quantize
from octavo_cpu.native import NativeLibrary, NativeLookup
from octavo_cpu.platform import CpuPlatform
from octavo_cpu.program import NativeProgram

LENGTHS = (48, 19, 33)


@pytest.fixture
def platform(library: NativeLibrary) -> CpuPlatform:
    made = CpuPlatform(native=NativeLookup(library, "the tests' own"))
    made.set_num_threads(2)
    return made


def texts(vocab_size: int = 160) -> list[list[int]]:
    generator = np.random.default_rng(1)
    return [generator.integers(0, vocab_size, n).tolist() for n in LENGTHS]


def describe(case: str, folder: Path) -> NativeModel:
    CASES[case].save(folder)
    return describe_native(folder_files(folder), 64)


def check_rows_apart(paged: Paged, platform: CpuPlatform) -> list[torch.Tensor]:
    """Logits of each text, which are the same bits however they are computed."""
    prompts = texts(paged.description.vocab_size)
    alone = [paged.whole(prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        for chunk in (1, 5, 17):
            assert torch.equal(paged.chunked(prompt, chunk), logits)
    sequences = [paged.begin(prompt) for prompt in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    while work := [(i, s) for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]:
        shares = [(s, min((1, 7, 16)[i], len(s.token_ids) - s.num_computed)) for i, s in work]
        for (i, _), logits in zip(work, paged.step(shares), strict=True):
            found[i].append(logits)
    paged.end(*sequences)
    for parts, logits in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(parts), logits)
    platform.set_num_threads(1)
    assert torch.equal(paged.whole(prompts[0]), alone[0])
    platform.set_num_threads(2)
    return alone


@pytest.mark.parametrize("case", CASES)
def test_every_family_has_the_generic_programs_logits(case: str, tmp_path: Path, platform: CpuPlatform) -> None:
    description = describe(case, tmp_path)
    paged = Paged(description, platform=platform)
    assert isinstance(paged.program, NativeProgram)
    truth = Paged(description, weights=paged.weights)
    for prompt, logits in zip(texts(description.vocab_size), check_rows_apart(paged, platform), strict=True):
        torch.testing.assert_close(logits, truth.whole(prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
def test_sizes_that_are_no_whole_panels_or_groups(gated: bool, tmp_path: Path, platform: CpuPlatform) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 161}
    tiny = Tiny("Llama", base(**sizes)) if gated else Tiny("Phi", base(**sizes))
    tiny.save(tmp_path)
    description = describe_native(folder_files(tmp_path), 64)
    paged = Paged(description, platform=platform)
    assert isinstance(paged.program, NativeProgram)
    truth = Paged(description, weights=paged.weights)
    for prompt, logits in zip(texts(161), check_rows_apart(paged, platform), strict=True):
        torch.testing.assert_close(logits, truth.whole(prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4", "int4 in bfloat16"])
@pytest.mark.parametrize("case", ["llama", "gemma2", "phi", "qwen2_moe", "gpt_oss", "deepseek_v3-dense"])
def test_every_precision_keeps_rows_apart(case: str, form: str, tmp_path: Path, platform: CpuPlatform) -> None:
    description = describe(case, tmp_path)
    dtype = torch.bfloat16 if "bfloat16" in form else torch.float32
    weights = load_weights(description, dtype=dtype, device=torch.device("cpu"), progress=False)
    dense = dict(weights)
    if form.startswith("int"):
        for name, weight in weights.items():
            if weight.dim() >= 2 and not name.endswith(("positions", "router", "shared.gate", "kv_b", ".bias")):
                weights[name] = quantize(weight.flatten(0, -2), form[:4])
                dense[name] = weights[name].dequantize().to(dtype).view(weight.shape)
    paged = Paged(description, weights=weights, platform=platform, dtype=dtype)
    assert isinstance(paged.program, NativeProgram)
    truth = Paged(description, weights={name: weight.float() for name, weight in dense.items()})
    for prompt, logits in zip(texts(description.vocab_size), check_rows_apart(paged, platform), strict=True):
        expected = truth.whole(prompt)
        error = (logits - expected).norm() / expected.norm()
        allowed = 0.02 if form == "bfloat16" else 0.04
        assert error < (2 * allowed if "moe" in case else allowed)  # where two experts are near, rounding chooses


def test_rows_yield_what_their_modes_say(tmp_path: Path, platform: CpuPlatform) -> None:
    description = describe("llama", tmp_path)
    paged = Paged(description, platform=platform)
    truth = Paged(description, weights=paged.weights)
    prompt = texts(description.vocab_size)[0]
    modes = np.array([RowMode(i % len(RowMode)) for i in range(40)], np.uint8)
    index = np.random.default_rng(2).integers(0, len(prompt), 40)
    rows = Rows(index, modes, k=3, target=np.arange(40) % description.vocab_size)
    outputs = []
    for one in (paged, truth):
        sequence = one.begin(prompt)
        outputs.append(one.program.submit(one.batch([(sequence, len(prompt))]), rows).result())
    found, expected = outputs
    for name in ("greedy_ids", "topk_ids", "target_ranks"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    for name in ("logits", "hidden", "topk_logprobs", "target_logprobs"):
        values = torch.as_tensor(getattr(found, name)), torch.as_tensor(getattr(expected, name))
        torch.testing.assert_close(*values, atol=1e-4, rtol=1e-4)


def test_only_the_best_ids_are_made_where_nothing_else_is_asked(tmp_path: Path, platform: CpuPlatform) -> None:
    description = describe("gemma2", tmp_path)  # logits with a soft cap
    paged = Paged(description, platform=platform)
    prompt = texts(description.vocab_size)[0]
    best = paged.whole(prompt).argmax(-1).numpy()
    sequence = paged.begin(prompt)
    rows = Rows(np.arange(len(prompt)), np.full(len(prompt), RowMode.GREEDY, np.uint8))
    output = paged.program.submit(paged.batch([(sequence, len(prompt))]), rows).result()
    assert output.greedy_ids is not None
    assert np.array_equal(output.greedy_ids, best)


def test_a_row_without_numbers_has_no_best_id(tmp_path: Path, platform: CpuPlatform) -> None:
    description = describe("llama", tmp_path)
    weights = load_weights(description, dtype=torch.float32, device=torch.device("cpu"), progress=False)
    weights["embedding"][7] = torch.nan
    weights.setdefault("head", weights["embedding"].nan_to_num())
    if description.spec.tied_embeddings:
        pytest.fail("the case has a head of its own")
    paged = Paged(description, weights=weights, platform=platform)
    sequences = [paged.begin([3, 5]), paged.begin([3, 7])]
    rows = Rows(np.array([1, 3]), np.full(2, RowMode.GREEDY, np.uint8))
    output = paged.program.submit(paged.batch([(s, 2) for s in sequences]), rows).result()
    assert output.greedy_ids is not None
    assert output.greedy_ids[0] >= 0
    assert output.greedy_ids[1] == -1


def test_what_a_step_must_not_hold_is_refused(tmp_path: Path, platform: CpuPlatform) -> None:
    paged = Paged(describe("llama", tmp_path), platform=platform)
    for token_ids in ([3, 160], [-1, 3]):
        sequence = paged.begin(token_ids)
        with pytest.raises(ValueError, match="a step of 2 tokens"):
            paged.step([(sequence, 2)])


def test_long_steps_give_signs_of_life(tmp_path: Path, platform: CpuPlatform) -> None:
    paged = Paged(describe("llama", tmp_path), max_model_len=256, platform=platform)
    beats: list[int] = []
    assert isinstance(paged.program, NativeProgram)
    paged.program.on_layer = lambda: beats.append(len(beats))
    paged.whole(list(range(100)))
    assert len(beats) == len(paged.description.spec.layers)  # type: ignore[union-attr]


def test_packed_weights_are_counted(tmp_path: Path, platform: CpuPlatform) -> None:
    description = describe("llama", tmp_path)
    paged = Paged(description, platform=platform)
    assert isinstance(paged.program, NativeProgram)
    costs = paged.program.costs
    matrices = {n: w for n, w in paged.weights.items() if w.dim() == 2 and n != "embedding"}
    assert costs.layer_bytes + costs.head_bytes == sum(w.nbytes for w in matrices.values())
    assert not any(isinstance(w, QuantizedWeight) for w in paged.weights.values())
