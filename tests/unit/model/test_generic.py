"""The generic program takes what the resolver gives it, and adds nothing that mixes rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from doubles.family_cases import CASES
from doubles.paged_program import Paged
from doubles.platforms import ToyPlatform
from doubles.tiny_models import folder_files

from octavo.contract import FusedAddRMSNorm, Linear, OpImpl, OpSignature, Support
from octavo.model.describe import describe_native, load_weights
from octavo.model.description import NativeModel

CPU = torch.device("cpu")


def row_by_row(args: Linear) -> torch.Tensor:
    return torch.cat([F.linear(args.x[i : i + 1], args.weight, args.bias) for i in range(len(args.x))])


def platform_of(*ops: OpImpl) -> ToyPlatform:
    return ToyPlatform(ops=ops)


def describe(case: str, folder: Path) -> NativeModel:
    CASES[case].save(folder)
    return describe_native(folder_files(folder), 64)


@pytest.mark.parametrize(
    "case", ["llama", "gemma2", "gemma3", "gpt2", "granite", "cohere2", "stablelm-parallel-qk-norm", "olmo2", "phi"]
)
def test_rows_keep_their_bits_where_every_link_says_so(case: str, tmp_path: Path) -> None:
    linear = OpImpl("linear", "rows", "native", row_by_row, row_invariant=Support.yes())
    paged = Paged(describe(case, tmp_path), platform=platform_of(linear))
    assert paged.program.row_invariant
    generator = np.random.default_rng(0)
    text, other = (generator.integers(0, 160, n).tolist() for n in (45, 30))
    whole = paged.whole(text)
    for chunk in (1, 7, 16, 17):
        assert torch.equal(paged.chunked(text, chunk), whole)
    ahead, late = paged.begin(text), paged.begin(other)
    found = paged.step([(ahead, 21)]) + paged.step([(late, 30), (ahead, 24)])[1:]
    assert torch.equal(torch.cat(found), whole)
    paged.end(ahead, late)


def test_weights_are_packed_once_each(tmp_path: Path) -> None:
    packed: list[torch.Size] = []

    def prepare(weight: torch.Tensor) -> Any:
        packed.append(weight.shape)
        return {"columns": weight.T.contiguous()}

    def multiply(args: Linear) -> torch.Tensor:
        y = args.x @ args.weight["columns"]
        return y if args.bias is None else y + args.bias

    linear = OpImpl("linear", "packed", "native", multiply, prepare=prepare)
    description = describe("llama-biases-head-dim", tmp_path)
    paged = Paged(description, platform=platform_of(linear))
    assert len(packed) == 4 * 4 + 1
    packed.clear()
    text = list(range(30))
    torch.testing.assert_close(paged.whole(text), Paged(description).whole(text), atol=1e-5, rtol=1e-5)
    assert packed == []


def test_a_fused_norm_may_write_over_its_inputs(tmp_path: Path) -> None:
    def fused(args: FusedAddRMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
        args.residual.add_(args.x)
        wide = args.residual.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + args.eps)
        args.x.copy_(normed * (args.weight + args.weight_offset))
        return args.x, args.residual

    in_place = OpImpl("fused_add_rms_norm", "in-place", "native", fused)
    for case in ("llama", "gemma2", "granite", "glm4"):
        folder = tmp_path / case
        description = describe(case, folder)
        text = [(3 * i) % 160 for i in range(40)]
        found = Paged(description, platform=platform_of(in_place))
        torch.testing.assert_close(found.whole(text), Paged(description).whole(text), atol=1e-5, rtol=1e-5)
        assert torch.equal(found.whole(text), found.whole(text))  # no weight was written over


def test_signatures_say_everything_that_is_known(tmp_path: Path) -> None:
    asked: list[OpSignature] = []

    def supports(signature: OpSignature) -> Support:
        asked.append(signature)
        return Support.no("only listens")

    names = ("rms_norm", "fused_add_rms_norm", "rotary_embedding", "act_and_mul", "linear", "embedding")
    ears = [OpImpl(name, "ear", "native", row_by_row, supports) for name in names]
    Paged(describe("llama", tmp_path), platform=platform_of(*ears))
    said = {str(signature) for signature in asked}
    assert said == {
        "rms_norm(float32, hidden_size=64)",
        "fused_add_rms_norm(float32, hidden_size=64)",
        "rotary_embedding(float32, head_size=16, rotary_dim=16, interleaved=False)",
        "act_and_mul(float32, activation=silu, width=96)",
        "linear(float32, weight_format=dense, in_features=64, out_features=128)",
        "linear(float32, weight_format=dense, in_features=64, out_features=64)",
        "linear(float32, weight_format=dense, in_features=64, out_features=192)",
        "linear(float32, weight_format=dense, in_features=96, out_features=64)",
        "linear(float32, weight_format=dense, in_features=64, out_features=160)",
        "embedding(float32, hidden_size=64, weight_format=dense)",
    }


def test_mixtures_and_latents_say_that_they_mix_rows(tmp_path: Path) -> None:
    linear = OpImpl("linear", "rows", "native", row_by_row, row_invariant=Support.yes())
    for case, parts in {
        "qwen3_moe": ["mixture of experts"],
        "deepseek_v3-yarn": ["latent attention", "mixture of experts"],
    }.items():
        answer = Paged(describe(case, tmp_path / case), platform=platform_of(linear)).program.row_invariant
        assert not answer
        assert sorted(reason.partition(":")[0] for reason in answer.reasons) == parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_come_in_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    description = describe("gpt_oss", tmp_path)
    weights = load_weights(description, dtype=dtype, device=CPU, progress=False)
    wide = load_weights(description, dtype=torch.float32, device=CPU, progress=False)
    for name, tensor in weights.items():
        in_float32 = name.endswith((".moe.router", ".moe.router.bias", ".attn.sinks"))
        assert tensor.dtype == (torch.float32 if in_float32 else dtype), name
        assert torch.equal(tensor, wide[name].to(tensor.dtype)), name
