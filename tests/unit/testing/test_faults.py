"""Platforms that do wrong, each in one way: the kit says which check, and why."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from doubles.platforms import ToyPlatform

from octavo.contract import (
    API_VERSION,
    Activation,
    AttentionBackend,
    AttentionSpec,
    Capabilities,
    Embedding,
    KVCache,
    MemoryInfo,
    OpImpl,
    OpSignature,
    Platform,
    Probe,
    RMSNorm,
    RotaryEmbedding,
    Support,
)
from octavo.contract.reference import reference_ops, rms_norm, rotary_embedding
from octavo.contract.reference_attention import ReferenceAttention
from octavo.testing import Bench, CheckError, checks

CPU = torch.device("cpu")
REFERENCE = {impl.op: impl for impl in reference_ops()}


class ToyBench(Bench):
    """A bench of a platform that no plugin brings."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform.name)
        self.platform = platform
        self.shared_ops = []


def failure_of(name: str, platform: Platform) -> str:
    """What the check says of the platform; empty where it passes."""
    (check,) = checks(patterns=[name])
    try:
        check.run(ToyBench(platform))
    except CheckError as error:
        return str(error)
    return ""


def native(fn: Callable[[Any], Any], op: str = "rms_norm", **fields: Any) -> OpImpl:
    return OpImpl(op, "toy", "native", fn, **fields)


def off_by_a_percent(args: RMSNorm) -> torch.Tensor:
    return rms_norm(args) * 1.01


def in_double(args: RMSNorm) -> torch.Tensor:
    return rms_norm(args).double()


def without_offset(args: RMSNorm) -> torch.Tensor:
    return rms_norm(RMSNorm(args.x, args.weight, args.eps))


def over_its_input(args: RMSNorm) -> torch.Tensor:
    args.x.copy_(rms_norm(args))
    return args.x.clone()


def beside_its_input(args: RMSNorm) -> torch.Tensor:
    y = rms_norm(args)
    args.x.as_strided((1,), (1,), args.x.storage_offset() - 1).zero_()
    return y


def reads_too_far(args: RMSNorm) -> torch.Tensor:
    """As a kernel does that takes every row for contiguous."""
    x = args.x.as_strided(args.x.shape, (args.x.shape[1], 1)) if args.x.dim() == 2 else args.x
    return rms_norm(RMSNorm(x, args.weight, args.eps, args.weight_offset))


def raises_on_many(args: RMSNorm) -> torch.Tensor:
    if args.x.shape[-1] > 1000:
        raise RuntimeError("built for up to 1000")
    return rms_norm(args)


def mixes_rows(args: RMSNorm) -> torch.Tensor:
    """Right, and a rounding off where rows are many."""
    y = rms_norm(args)
    return y * (1 + 2**-22) if len(y) > 1 else y


def no_tensor(args: RMSNorm) -> Any:
    return None


def supports_badly(signature: OpSignature) -> Support:
    raise KeyError("hidden")


OP_FAULTS = {
    "wrong": (native(off_by_a_percent), "is off by"),
    "dtype": (native(in_double), "returns torch.float64, torch.float32 is right"),
    "offset": (native(without_offset), "case offset: is off by"),
    "input": (native(over_its_input), "writes into x, which is not its own"),
    "guard": (native(beside_its_input), "writes beside x"),
    "stride": (native(reads_too_far), "case strided: is off by inf"),
    "raises": (native(raises_on_many), "says yes and raises RuntimeError: built for up to 1000"),
    "rows": (native(mixes_rows, row_invariant=Support.yes()), "claims that rows do not depend on each other, and row"),
    "none": (native(no_tensor), "returns NoneType, tensors are right"),
    "predicate": (native(rms_norm, supports=supports_badly), "raises KeyError: 'hidden'"),
    "no-support": (native(rms_norm, supports=lambda signature: True), "returns bool, not a Support"),  # type: ignore[arg-type,return-value]
}


@pytest.mark.parametrize("fault", OP_FAULTS)
def test_an_op_that_does_wrong(fault: str) -> None:
    impl, said = OP_FAULTS[fault]
    assert said in failure_of("ops/rms_norm/float32", ToyPlatform([impl]))


def test_rows_that_mix_are_no_fault_where_nothing_is_claimed() -> None:
    assert failure_of("ops/rms_norm/float32", ToyPlatform([native(mixes_rows)])) == ""


def test_a_rotation_that_forgets_the_rest_of_a_head() -> None:
    def zeroes_the_rest(args: RotaryEmbedding) -> Any:
        query, key = rotary_embedding(args)
        query[..., args.cos_sin.shape[1] :] = 0
        return query, key

    impl = native(zeroes_the_rest, "rotary_embedding")
    assert "case 3x8/1x80-32" in failure_of("ops/rotary_embedding/float32", ToyPlatform([impl]))


def test_a_packing_that_raises() -> None:
    def prepare(weight: torch.Tensor) -> Any:
        raise ValueError("rows are no multiple of 16")

    impl = native(REFERENCE["linear"].fn, "linear", prepare=prepare)
    said = failure_of("ops/linear/float32", ToyPlatform([impl]))
    assert "says yes and its prepare raises ValueError: rows are no multiple of 16" in said


@pytest.mark.parametrize("op", sorted(REFERENCE))
def test_every_op_is_held_against_its_formula(op: str) -> None:
    """An implementation that returns zeros is found out, whatever the op."""

    def zeros(args: Any) -> Any:
        found = REFERENCE[op].fn(args)
        return tuple(map(torch.zeros_like, found)) if isinstance(found, tuple) else torch.zeros_like(found)

    version = {"api_version": API_VERSION}
    said = failure_of(f"ops/{op}/float32", ToyPlatform([native(zeros, op, **version)]))
    assert ("draws other tokens" if op == "sample" else "is off by") in said
    assert failure_of(f"ops/{op}/float32", ToyPlatform([native(REFERENCE[op].fn, op, **version)])) == ""


@dataclass
class Wrong:
    """A backend of the reference with one method replaced."""

    said: str
    check: str = "kernels/plain"


class Liar(ReferenceAttention):
    name = "liar"

    def __init__(self) -> None:
        super().__init__(CPU)


class Raises(Liar):
    def attend(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no kernel image")


class ReadsTheTail(Liar):
    """Takes a row to end with its block."""

    def plan(self, cache: KVCache, batch: Any) -> Any:
        size = cache.spec.block_size
        longer = (-(-batch.seq_lens_host // size) * size).astype("int32")
        start = batch.query_start_loc_host
        return super().plan(cache, replace(batch, seq_lens_host=longer if len(start) > 1 else batch.seq_lens_host))


class IgnoresTheWindow(Liar):
    def plan(self, cache: KVCache, batch: Any) -> Any:
        return super().plan(replace(cache, spec=replace(cache.spec, window=None)), batch)


class IgnoresSinks(Liar):
    def attend(self, plan: Any, layer: int, query: Any, out: Any, sinks: Any = None) -> None:
        super().attend(plan, layer, query, out, None)


class WritesSkippedSlots(Liar):
    def plan(self, cache: KVCache, batch: Any) -> Any:
        slots = batch.slot_mapping_host.copy()
        slots[slots < 0] = int(batch.block_table_host[0, 0]) * cache.spec.block_size if len(slots) else 0
        return super().plan(cache, replace(batch, slot_mapping_host=slots))


class WritesBesideTheOutput(Liar):
    def attend(self, plan: Any, layer: int, query: Any, out: Any, sinks: Any = None) -> None:
        super().attend(plan, layer, query, out, sinks)
        if len(out):
            out.as_strided((1, *out.shape[1:]), out.stride(), out.storage_offset() + out.numel()).zero_()


class MixesRows(Liar):
    """Right, and a rounding off where rows are many."""

    def attend(self, plan: Any, layer: int, query: Any, out: Any, sinks: Any = None) -> None:
        super().attend(plan, layer, query, out, sinks)
        if len(out) > 1:
            out.mul_(1 + 2**-22)


class CopiesNothing(Liar):
    def copy_blocks(self, cache: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        pass


class SwapsTheWrongBlock(Liar):
    def swap_blocks(self, source: KVCache, target: KVCache, mapping: Sequence[tuple[int, int]]) -> None:
        super().swap_blocks(source, target, [(a, mapping[0][1]) for a, _ in mapping])


class CountsBytesBadly(Liar):
    def block_bytes(self, spec: AttentionSpec) -> int:
        return super().block_bytes(spec) // 2


ATTENTION_FAULTS: dict[type[Liar], Wrong] = {
    Raises: Wrong("liar says yes to AttentionSpec(num_layers=1, num_heads=4"),
    ReadsTheTail: Wrong(""),
    IgnoresTheWindow: Wrong("is off by", "kernels/window"),
    IgnoresSinks: Wrong("is off by", "kernels/sinks"),
    WritesSkippedSlots: Wrong("is off by nan", "kernels/slots"),
    WritesBesideTheOutput: Wrong("attend writes outside of its output"),
    MixesRows: Wrong("liar claims that a row's bits are its own, and row"),
    CopiesNothing: Wrong("is off by nan", "kernels/copies"),
    SwapsTheWrongBlock: Wrong("is off by", "kernels/swaps"),
    CountsBytesBadly: Wrong("block_bytes says", "kernels/copies"),
}


@pytest.mark.parametrize("liar", ATTENTION_FAULTS, ids=lambda liar: liar.__name__)
def test_a_backend_that_lies(liar: type[Liar]) -> None:
    wrong = ATTENTION_FAULTS[liar]
    can = Capabilities(block_sizes=(8, 16))
    said = failure_of(wrong.check, ToyPlatform(backends=[liar()], capabilities=can))
    assert said
    assert wrong.said in said
    assert failure_of(wrong.check, ToyPlatform(backends=[Liar()], capabilities=can)) == ""


class OddPlatform(ToyPlatform):
    """Each field that is set takes the place of what the toy says."""

    def __init__(self, **odd: Any) -> None:
        super().__init__(capabilities=odd.pop("capabilities", None))
        self._odd = odd

    def memory_info(self) -> MemoryInfo:
        return self._odd.get("memory", super().memory_info())

    def config_defaults(self, view: Any) -> Any:
        return self._odd.get("defaults", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_") and self._odd.get("anything"):
            return False
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("check", "odd", "said"),
    [
        ("platform/memory", {"memory": MemoryInfo(free=3, total=2)}, "0 <= free <= total"),
        ("platform/memory", {"memory": (1, 2)}, "memory_info() returns tuple"),
        ("platform/settings", {"defaults": {"blocksize": 3}}, "names settings that there are not: blocksize"),
        ("platform/attributes", {"anything": True}, "every attribute is there"),
    ],
)
def test_a_platform_that_says_nonsense(check: str, odd: dict[str, Any], said: str) -> None:
    assert said in failure_of(check, OddPlatform(**odd))
    assert failure_of(check, OddPlatform()) == ""


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        ((1e9, {}), "probe() returns tuple"),
        (Probe(0.0, {}), "0.0 bytes a second"),
        (Probe(1e9, {torch.float32: -1.0}), "-1.0 operations a second in torch.float32"),
        (Probe(1e9, {torch.float32: 1e9}), ""),
    ],
)
def test_limits_that_are_none(probe: Any, said: str) -> None:
    class Measured(ToyPlatform):
        def probe(self, num_bytes: int) -> Any:
            return probe

    assert said in failure_of("platform/probe", Measured())
    assert bool(failure_of("platform/probe", Measured())) == bool(said)


def test_a_backend_whose_predicate_raises() -> None:
    class Unsure(Liar):
        def supports(self, spec: AttentionSpec) -> Support:
            raise LookupError(f"head size {spec.head_size}")

    backend: AttentionBackend = Unsure()
    said = failure_of("platform/answers", ToyPlatform(backends=[backend]))
    assert said.startswith("liar: supports(")
    assert said.endswith("raises LookupError: head size 16")


def test_what_serves_is_checked_where_the_platform_has_nothing_of_its_own() -> None:
    def zeros(args: Activation | Embedding) -> torch.Tensor:
        return torch.zeros(0)

    wrong_shape = native(zeros, "embedding")
    assert "returns shape (0,), (1, 1) is right" in failure_of("ops/embedding/float32", ToyPlatform([wrong_shape]))
    assert failure_of("attention/latent", ToyPlatform()) == ""
