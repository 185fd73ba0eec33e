"""The contract holds what it promises: every op and hook is defined, documented, referenced and has cases."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from doubles.platforms import ToyPlatform

import octavo.contract
from octavo.contract import (
    API_VERSION,
    OPS,
    AddedField,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    CompileRequest,
    HookSpecs,
    KVCache,
    OpDefinition,
    OpImpl,
    OpSignature,
    Platform,
    PlatformInfo,
    RMSNorm,
    RowMode,
    Rows,
    StepBatch,
    StepOutput,
    Support,
)
from octavo.contract.reference import ACTIVATIONS, GATED_ACTIVATIONS, reference_ops
from octavo.testing.cases_ops import CASES
from octavo.testing.formulas import ACTIVATION_FORMULAS, FORMULAS

FOLDER = Path(octavo.contract.__file__).parent


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_whole(op: str) -> None:
    definition = OPS[op]
    assert definition.name == op
    assert issubclass(definition.args, msgspec.Struct)
    assert definition.args.__struct_config__.frozen
    assert definition.args.__doc__
    (reference,) = [impl for impl in reference_ops() if impl.op == op]
    assert (reference.provider, reference.tier) == ("numpy" if op == "sample" else "torch", "reference")
    assert op in FORMULAS
    cases = [case for case in CASES if case.op == op]
    assert len(cases) >= 4
    assert len({case.label for case in cases}) == len(cases)
    assert all(set(case.traits) == set(definition.traits) for case in cases)


def test_every_activation_has_a_formula_and_cases() -> None:
    assert set(ACTIVATION_FORMULAS) == set(ACTIVATIONS)
    used = {case.traits["activation"] for case in CASES if case.op == "act_and_mul"}
    assert used == {*ACTIVATIONS, *GATED_ACTIVATIONS}


def test_every_hook_is_documented_and_returns_a_list() -> None:
    hooks = [name for name in vars(HookSpecs) if not name.startswith("__")]
    assert hooks == ["octavo_platforms", "octavo_ops"]
    for name in hooks:
        spec = getattr(HookSpecs, name)
        assert spec.__doc__
        assert str(inspect.signature(spec).return_annotation).startswith("list[")


def test_every_public_name_is_documented_and_listed_once() -> None:
    names = octavo.contract.__all__
    assert len(set(names)) == len(names)
    for name in names:
        thing = getattr(octavo.contract, name)
        if inspect.isclass(thing):
            assert thing.__doc__, name


def optional_methods(base: type) -> Iterator[str]:
    for name, member in vars(base).items():
        required = getattr(member, "__isabstractmethod__", False)
        if inspect.isfunction(member) and not name.startswith("_") and not required:
            yield name


@pytest.mark.parametrize(
    ("base", "required"),
    [
        (Platform, {"capabilities", "device", "memory_info"}),
        (AttentionBackend, {"supports", "block_bytes", "allocate", "plan", "write", "attend"}),
    ],
)
def test_optional_means_a_stated_default(base: type, required: set[str]) -> None:
    assert base.__abstractmethods__ == required  # type: ignore[attr-defined]
    for name in optional_methods(base):
        assert (getattr(base, name).__doc__ or "").startswith("(optional"), f"{base.__name__}.{name}"
        assert "Default" in getattr(base, name).__doc__, f"{base.__name__}.{name}"


def test_a_platform_of_three_members_works() -> None:
    platform = ToyPlatform()
    base = super(ToyPlatform, platform)
    assert (base.ops(), base.attention_backends(), platform.diagnostics()) == ([], [], {})
    assert platform.config_defaults({"dtype": "float32"}) == {}
    platform.synchronize()
    platform.set_num_threads(1)
    assert platform.probe(1 << 20) is None
    with pytest.raises(AttributeError):
        platform.is_something  # type: ignore[attr-defined]  # noqa: B018


def test_a_platform_compiles_nothing_by_default() -> None:
    from octavo.contract import DecoderSpec

    spec = DecoderSpec(8, 4, (), None, tied_embeddings=True)
    assert ToyPlatform().compile(CompileRequest(spec, {}, torch.float32, [], 8, 8)) is None


class LeastBackend(AttentionBackend):
    """What an outsider must write, and no line more."""

    name = "least"

    def supports(self, spec: AttentionSpec) -> Support:
        return Support.yes()

    def block_bytes(self, spec: AttentionSpec) -> int:
        return 4 * spec.block_size

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        return KVCache(spec, num_blocks, (torch.zeros(num_blocks, spec.block_size),))

    def plan(self, cache: KVCache, batch: AttentionBatch) -> list[str]:
        return []

    def write(self, plan: list[str], layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        plan.append("write")

    def attend(
        self,
        plan: list[str],
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        plan.append("attend")


class OpaqueBackend(LeastBackend):
    """Keeps its blocks elsewhere than in tensors."""

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        return KVCache(spec, num_blocks)


SPEC = AttentionSpec(1, 2, 1, 4, 4, 8, torch.float32, torch.float32, 0.5)


def test_an_attention_backend_of_six_methods_copies_swaps_and_fuses() -> None:
    backend, plan = LeastBackend(), list[str]()
    x = torch.zeros(0)
    backend.write_attend(plan, 0, x, x, x, x)
    assert plan == ["write", "attend"]
    assert backend.row_invariant == Support.no("attention backend least makes no claim")
    device, host = backend.allocate(SPEC, 3), backend.allocate_host(SPEC, 2)
    assert [t.shape for t in host.tensors] == [(2, 8)]
    device.tensors[0][2] = 5.0
    backend.swap_blocks(device, host, [(2, 1)])
    backend.copy_blocks(device, [(2, 0)])
    assert host.tensors[0].mean(1).tolist() == [0.0, 5.0]
    assert device.tensors[0].mean(1).tolist() == [5.0, 0.0, 5.0]


def test_blocks_that_are_no_tensors_are_never_moved_in_silence() -> None:
    backend = OpaqueBackend()
    cache = backend.allocate(SPEC, 3)
    for move in (
        lambda: backend.copy_blocks(cache, [(0, 1)]),
        lambda: backend.swap_blocks(cache, cache, [(0, 1)]),
        lambda: backend.allocate_host(SPEC, 1),
    ):
        with pytest.raises(TypeError, match="its backend's own allocate_host, copy_blocks, swap_blocks"):
            move()


def test_a_no_needs_a_reason() -> None:
    for make in (lambda: Support.no(), lambda: Support(False)):
        with pytest.raises(ValueError, match="a no needs a reason"):
            make()
    with pytest.raises(TypeError, match="must be a tuple of texts"):
        Support(False, "head size 80")  # type: ignore[arg-type]


def test_answers_add_up() -> None:
    yes, remark, no, other = Support.yes(), Support.yes("slowly"), Support.no("too wide"), Support.no("too deep")
    assert bool(yes) is True
    assert bool(no) is False
    assert yes & remark == Support.yes("slowly")
    assert remark & no == Support.no("too wide")
    assert no & other == Support.no("too wide", "too deep")
    assert [str(yes), str(remark), str(no & other)] == ["yes", "yes: slowly", "no: too wide; too deep"]


GOOD_INFO = PlatformInfo("chip-2", API_VERSION, True, "driver 12 found", lambda device: ToyPlatform())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "Chip"}, "name must be"),
        ({"name": ""}, "name must be"),
        ({"api_version": (0,)}, "api_version must be"),
        ({"api_version": (0, "9")}, "api_version must be"),
        ({"available": 1}, "available must be"),
        ({"reason": ""}, "reason must be"),
        ({"priority": True}, "priority must be"),
        ({"priority": 1.5}, "priority must be"),
        ({"devices": ["chip 0"]}, "devices must be"),
        ({"create": "chip"}, "create must"),
    ],
)
def test_a_platforms_facts_are_checked_where_they_are_stated(change: dict[str, object], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        replace(GOOD_INFO, **change)  # type: ignore[arg-type]


def test_an_implementation_is_checked_where_it_is_offered() -> None:
    def one(args: object) -> None: ...

    def two(args: object, more: object) -> None: ...

    OpImpl("rms_norm", "p", "native", one, prepare=one)
    OpImpl("rms_norm", "p", "native", msgspec.json.encode, supports=bool)  # type: ignore[arg-type]
    for wrong in ({"fn": two}, {"fn": None}, {"supports": two}, {"prepare": two}):
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} of rms_norm must take one argument"):
            OpImpl(**{"op": "rms_norm", "provider": "p", "tier": "native", "fn": one, **wrong})  # type: ignore[arg-type]


def test_a_signature_reads_as_a_call() -> None:
    signature = OpSignature("linear", torch.bfloat16, "cpu", (("in_features", 4), ("weight_format", "dense")))
    assert str(signature) == "linear(bfloat16, in_features=4, weight_format=dense)"
    assert (signature.trait("in_features"), signature.trait("bias", False)) == (4, False)
    assert hash(signature) == hash(replace(signature))


def test_a_call_needs_the_version_of_the_newest_trait_it_uses() -> None:
    definition = OpDefinition("x", RMSNorm, ("a", "b"), (AddedField("a", (0, 10), 0), AddedField("b", (1, 1), False)))

    def needs(**traits: int) -> tuple[int, int]:
        return definition.version_for(OpSignature("x", torch.float32, "cpu", tuple(traits.items())))

    found = [needs(), needs(a=0, b=False), needs(a=1), needs(b=True), needs(a=1, b=True)]
    assert found == [(0, 9), (0, 9), (0, 10), (1, 1), (1, 1)]


def test_rows_are_sorted_by_what_they_want() -> None:
    rows = Rows(np.array([4, 4, 7]), np.array([RowMode.TOPK, RowMode.LOGITS, RowMode.TOPK], np.uint8), k=2)
    assert rows.of(RowMode.TOPK).tolist() == [0, 2]
    assert rows.of(RowMode.LOGITS).tolist() == [1]
    assert rows.of(RowMode.GREEDY).tolist() == []
    assert StepOutput().logits is None
    assert StepBatch(torch.zeros(1), torch.zeros(1), []).adapter_ids is None


def test_the_contract_imports_nothing_else_of_octavo() -> None:
    code = (
        "import sys, octavo.contract, octavo.contract.reference, octavo.contract.reference_attention\n"
        "names = sorted(name for name in sys.modules if name.startswith('octavo.'))\n"
        "assert all(name.startswith(('octavo.contract', 'octavo.errors')) for name in names), names\n"
    )
    env = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def test_no_signature_reads_the_environment_or_the_clock() -> None:
    """What serves is a function of the signature; nothing else may enter by a side door."""
    for path in FOLDER.glob("*.py"):
        imported = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & {"os", "time", "random", "datetime"}, path.name
