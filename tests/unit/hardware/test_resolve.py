"""From signature to function: the order of tiers, the reasons, freezing, and the manifest."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles.platforms import ToyPlatform

from octavo.contract import (
    OPS,
    AddedField,
    AttentionSpec,
    Capabilities,
    OpDefinition,
    OpImpl,
    OpSignature,
    RMSNorm,
    Support,
    Tier,
)
from octavo.contract.reference import rms_norm
from octavo.contract.reference_attention import ReferenceAttention
from octavo.errors import PlatformError, UnsupportedError
from octavo.hardware.resolve import Manifest, OpResolver
from octavo_triton.plugin import octavo_ops

NORM = OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 64),))
WIDE_NORM = OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 4096),))
SPEC = AttentionSpec(2, 6, 3, 16, 16, 8, torch.float32, torch.float32, 0.25)


def impl(
    provider: str,
    tier: Tier = "native",
    supports: Callable[[OpSignature], Any] = lambda signature: Support.yes(),
    **more: Any,
) -> OpImpl:
    def fn(args: Any) -> Any:
        return provider

    return OpImpl("rms_norm", provider, tier, fn, supports, **more)


def at_most(size: int) -> Callable[[OpSignature], Support]:
    def supports(signature: OpSignature) -> Support:
        given = signature.trait("hidden_size")
        return Support.yes() if given <= size else Support.no(f"hidden size {given}, built for {size}")

    return supports


def test_native_then_portable_then_reference() -> None:
    portable, native = impl("portable", "portable", at_most(1024)), impl("native", supports=at_most(32))
    resolver = OpResolver(ToyPlatform([native]), [portable])
    small = OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 8),))
    assert resolver.resolve(small).impl is native
    assert resolver.resolve(NORM).impl is portable
    wide = resolver.resolve(WIDE_NORM)
    assert (wide.impl.provider, wide.impl.tier) == ("torch", "reference")
    assert [str(skipped) for skipped in wide.skipped] == [
        "native (native): hidden size 4096, built for 32",
        "portable (portable): hidden size 4096, built for 1024",
    ]


def test_within_a_tier_the_platforms_own_goes_first() -> None:
    shared, own = impl("shared", "portable"), impl("own", "portable")
    assert OpResolver(ToyPlatform([own]), [shared]).resolve(NORM).impl is own


def test_the_call_is_the_implementations_bare_function() -> None:
    fast = impl("fast")
    resolved = OpResolver(ToyPlatform([fast])).resolve(NORM)
    assert resolved.fn is fast.fn
    assert OpResolver(ToyPlatform()).resolve(NORM).fn is rms_norm


def test_the_same_signature_is_asked_once() -> None:
    asked = []

    def supports(signature: OpSignature) -> Support:
        asked.append(signature)
        return Support.yes()

    resolver = OpResolver(ToyPlatform([impl("fast", supports=supports)]))
    assert resolver.resolve(NORM) is resolver.resolve(replace(NORM))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("supports", "said"),
    [
        (lambda signature: {}["x"], "its supports() raised KeyError: 'x'"),
        (lambda signature: True, "its supports() returned bool, a Support is needed"),
        (lambda signature: None, "its supports() returned NoneType, a Support is needed"),
    ],
)
def test_a_faulty_predicate_is_a_no_with_its_reason(supports: Callable[[OpSignature], Any], said: str) -> None:
    resolved = OpResolver(ToyPlatform([impl("faulty", supports=supports)])).resolve(NORM)
    assert resolved.impl.tier == "reference"
    assert resolved.skipped[0].reasons == (said,)


def test_strict_refuses_a_fallback_and_nothing_else() -> None:
    native, portable = impl("fast", supports=at_most(64)), impl("portable", "portable")
    strict = OpResolver(ToyPlatform([native]), [portable], strict=True)
    assert strict.resolve(NORM).impl is native
    with pytest.raises(PlatformError) as caught:
        strict.resolve(WIDE_NORM)
    assert str(caught.value) == (
        "rms_norm(float32, hidden_size=4096) would fall back to portable (portable), and strict_ops is set; "
        "passed over: fast (native): hidden size 4096, built for 64"
    )
    # Where nothing faster is offered the reference is no fallback.
    assert OpResolver(ToyPlatform(), strict=True).resolve(NORM).impl.tier == "reference"


def test_what_nobody_serves_lists_everybodys_reasons() -> None:
    q4 = OpSignature("linear", torch.float32, "cpu", (("weight_format", "q4"),))
    with pytest.raises(UnsupportedError) as caught:
        OpResolver(ToyPlatform()).resolve(q4)
    assert str(caught.value) == (
        "nothing on platform toy serves linear(float32, weight_format=q4): "
        "torch (reference): weight format q4, torch's linear takes dense weights, int8, int4"
    )


def test_once_frozen_nothing_new_is_resolved() -> None:
    resolver = OpResolver(ToyPlatform())
    known, backend = resolver.resolve(NORM), resolver.resolve_attention(SPEC)
    resolver.freeze()
    assert resolver.resolve(NORM) is known
    assert resolver.resolve_attention(SPEC) is backend
    with pytest.raises(RuntimeError, match=r"rms_norm\(float32, hidden_size=4096\) is asked for after"):
        resolver.resolve(WIDE_NORM)
    with pytest.raises(RuntimeError, match=r"attention\(.* is asked for after"):
        resolver.resolve_attention(replace(SPEC, head_size=32))


def test_an_implementation_of_an_older_version_never_sees_a_newer_trait(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = OpDefinition("rms_norm", RMSNorm, ("hidden_size", "clamp"), (AddedField("clamp", (0, 12), False),))
    monkeypatch.setitem(OPS, "rms_norm", newer)
    old, new = impl("old", api_version=(0, 11)), impl("new", "portable", api_version=(0, 12))
    resolver = OpResolver(ToyPlatform([old]), [new])
    with_clamp = OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 64), ("clamp", True)))
    default = OpSignature("rms_norm", torch.float32, "cpu", (("hidden_size", 64), ("clamp", False)))
    assert resolver.resolve(default).impl is old
    assert resolver.resolve(NORM).impl is old
    resolved = resolver.resolve(with_clamp)
    assert resolved.impl is new
    assert resolved.skipped[0].reasons == ("written for contract 0.11, the call uses what 0.12 added",)


def test_an_attention_backend_of_an_older_version_never_sees_a_newer_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionSpec, "added", (AddedField("softcap", (1, 1), None),))
    monkeypatch.setattr(ReferenceAttention, "api_version", (1, 1))
    old = PickyAttention(torch.device("cpu"))
    old.api_version = (0, 9)  # of the major before, whose minor is the higher number
    resolver = OpResolver(ToyPlatform(backends=[old]))
    assert resolver.resolve_attention(SPEC) is old
    capped = replace(SPEC, softcap=30.0)
    assert type(resolver.resolve_attention(capped)) is ReferenceAttention
    (row,) = [row for row in resolver.manifest.rows if "softcap" in row.call]
    assert row.skipped[0].reasons == ("written for contract 0.9, the call uses what 1.1 added",)


def raising() -> list[Any]:
    raise OSError("library is gone")


@pytest.mark.parametrize(
    ("hook", "answer", "said"),
    [
        ("ops", raising, "platform 'toy' failed in ops(): OSError: library is gone"),
        ("ops", lambda: None, "platform 'toy' failed in ops(): a list of OpImpl is needed"),
        ("ops", lambda: [rms_norm], "platform 'toy' failed in ops(): a list of OpImpl is needed"),
        ("attention_backends", raising, "platform 'toy' failed in attention_backends(): OSError: library is gone"),
        ("attention_backends", lambda: ReferenceAttention, "a list of AttentionBackend is needed"),
        ("ops", lambda: [OpImpl("rmsnorm", "p", "native", rms_norm)], "unknown op 'rmsnorm'; did you mean 'rms_norm'?"),
    ],
)
def test_a_platform_that_fails_to_say_what_it_offers(
    hook: str, answer: Callable[[], Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = ToyPlatform()
    monkeypatch.setattr(platform, hook, answer)
    with pytest.raises(PlatformError, match=re.escape(said)):
        OpResolver(platform)


def test_ops_of_a_later_minor_are_left_alone() -> None:
    later = OpImpl("new_op", "p", "native", rms_norm, api_version=(0, 99))
    assert OpResolver(ToyPlatform([later])).resolve(NORM).fn is rms_norm


class PickyAttention(ReferenceAttention):
    name = "picky"

    def supports(self, spec: AttentionSpec) -> Support:
        return Support.yes() if spec.head_size == 16 else Support.no(f"head size {spec.head_size}, built for 16")

    @property
    def row_invariant(self) -> Support:
        return Support.no("splits by the longest row")


class FaultyAttention(ReferenceAttention):
    name = "faulty"

    def supports(self, spec: AttentionSpec) -> Support:
        raise OSError("no such kernel")


def test_attention_is_resolved_in_the_platforms_order_and_then_the_reference() -> None:
    device = torch.device("cpu")
    faulty, picky = FaultyAttention(device), PickyAttention(device)
    resolver = OpResolver(ToyPlatform(backends=[faulty, picky]))
    assert resolver.resolve_attention(SPEC) is picky
    other = replace(SPEC, head_size=80, window=7, sinks=True, softcap=50.0)
    assert type(resolver.resolve_attention(other)) is ReferenceAttention
    narrow, wide = resolver.manifest.rows
    assert (narrow.provider, narrow.tier) == ("picky", "native")
    assert wide.call == (
        "attention(float32, kv=float32, 6/3 heads, head_size=80, block_size=8, window=7, softcap=50, sinks)"
    )
    assert [str(skipped) for skipped in wide.skipped] == [
        "faulty (native): its supports() raised OSError: no such kernel",
        "picky (native): head size 80, built for 16",
    ]
    with pytest.raises(PlatformError, match="would fall back to torch"):
        OpResolver(ToyPlatform(backends=[picky]), strict=True).resolve_attention(other)
    with pytest.raises(UnsupportedError, match="int16"):
        resolver.resolve_attention(replace(SPEC, kv_dtype=torch.int16, head_size=8))


def manifest(*ops: OpImpl, order: int = 1) -> Manifest:
    resolver = OpResolver(ToyPlatform(ops))
    for signature in (NORM, WIDE_NORM)[::order]:
        resolver.resolve(signature)
    resolver.resolve_attention(SPEC)
    return resolver.manifest


def test_the_manifests_hash_names_who_serves_what() -> None:
    plain = manifest(impl("fast"))
    assert plain.hash == manifest(impl("fast")).hash
    assert plain.hash == manifest(impl("fast"), order=-1).hash, "the order of asking is no part of it"
    assert plain.hash == manifest(impl("slow", supports=lambda s: Support.no("never")), impl("fast")).hash
    others = [manifest(), manifest(impl("quick")), manifest(impl("fast", version="2"))]
    others.append(manifest(impl("fast", supports=at_most(64))))
    assert len({plain.hash, *(other.hash for other in others)}) == 5
    assert manifest().hash == "603fd19c855f1ad0", "changes only with the contract's version"


def test_the_chain_is_row_invariant_where_every_link_is() -> None:
    assert manifest(impl("fast", row_invariant=Support.yes())).row_invariant
    answer = manifest(impl("fast", row_invariant=Support.no("tiles by batch"))).row_invariant
    assert answer == Support.no("rms_norm (fast): tiles by batch"), "one line, though two signatures are served"
    resolver = OpResolver(ToyPlatform(backends=[PickyAttention(torch.device("cpu"))]))
    resolver.resolve_attention(SPEC)
    resolver.resolve(OpSignature("linear", torch.float32, "cpu"))
    assert resolver.manifest.row_invariant.reasons == (
        "attention (picky): splits by the longest row",
        "linear (torch): torch's matrix product picks its tiling by the number of rows",
    )


def test_the_portable_kernels_stand_between_native_and_reference() -> None:
    """The chain as installed: a platform that runs Triton gets its kernels where they can serve."""
    platform = ToyPlatform([impl("own", supports=at_most(32))], capabilities=Capabilities(kernel_languages=("triton",)))
    resolver = OpResolver(platform, octavo_ops(platform.capabilities()))
    on_chip = OpSignature("rms_norm", torch.bfloat16, "chip", (("hidden_size", 576),))
    resolved = resolver.resolve(on_chip)
    assert (resolved.impl.provider, resolved.impl.tier) == ("triton", "portable")
    assert [skipped.provider for skipped in resolved.skipped] == ["own"]
    too_wide = OpSignature("rms_norm", torch.float64, "chip", (("hidden_size", 70000),))
    resolved = resolver.resolve(too_wide)
    assert (resolved.impl.provider, resolved.impl.tier) == ("torch", "reference")
    assert resolved.skipped[1].reasons == (
        "hidden size 70000, a row of at most 65536 fits a tile",
        "dtype float64, built for float32, bfloat16, float16",
    )
    assert octavo_ops(Capabilities()) == []
