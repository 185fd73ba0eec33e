"""From an op and its signature to a function: once, when the model loads, and with every reason kept.

For each signature the first implementation that can serve is taken: native, then portable, then the torch
reference; within a tier the platform's own come before shared ones. Nothing falls back in silence: the
manifest lists each choice with the reasons of those passed over.
"""

import hashlib
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.contract import OPS, TIERS, AttentionBackend, AttentionSpec, OpImpl, OpSignature, Platform, Support, Tier
from octavo.contract.reference import reference_ops
from octavo.contract.reference_attention import ReferenceAttention
from octavo.contract.version import API_VERSION
from octavo.errors import PlatformError, UnsupportedError
from octavo.hardware.text import nearest, one_line

__all__ = ["Manifest", "ManifestRow", "OpResolver", "ResolvedOp", "Skipped"]


T = TypeVar("T")


@dataclass(frozen=True)
class Skipped:
    """An implementation that was asked first and could not serve."""

    provider: str
    tier: Tier
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.provider} ({self.tier}): {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class ResolvedOp:
    """What serves a signature. `fn` is the implementation's bare function: a call costs nothing more.

    Attributes:
        fn: called with the op's args object.
        impl: where it comes from; `impl.prepare` packs a linear's weight.
        skipped: the faster ones that were passed over, in the order in which they were asked.

    """

    fn: Callable[[Any], Any]
    impl: OpImpl
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class ManifestRow:
    """One line of the op table."""

    call: str  # the signature as text, or what is asked of attention
    provider: str
    tier: Tier
    version: str
    row_invariant: Support
    graph_safe: bool
    skipped: tuple[Skipped, ...]


@dataclass(frozen=True)
class Manifest:
    """Everything that was resolved, in order of the calls' text."""

    rows: tuple[ManifestRow, ...]

    @property
    def hash(self) -> str:
        """16 hex digits that identify compiled artefacts: who serves what. Reasons do not enter."""
        lines = [f"contract {API_VERSION[0]}.{API_VERSION[1]}"]
        lines += [f"{row.call}\t{row.provider}\t{row.tier}\t{row.version}" for row in self.rows]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    @property
    def row_invariant(self) -> Support:
        """Yes where every link of the chain says yes; else which links do not, and why."""
        broken = [(row, reason) for row in self.rows for reason in row.row_invariant.reasons if not row.row_invariant]
        reasons = [f"{row.call.partition('(')[0]} ({row.provider}): {reason}" for row, reason in broken]
        return Support.no(*dict.fromkeys(reasons)) if reasons else Support.yes()


class OpResolver:
    """Chooses implementations for one platform. Made in each worker, frozen once the model has loaded."""

    def __init__(self, platform: Platform, shared_ops: Sequence[OpImpl] = (), strict: bool = False) -> None:
        """Ask `platform` for its ops and attention backends.

        Args:
            platform: whose tensors the ops will get.
            shared_ops: portable implementations, from `Registry.ops`.
            strict: a faster implementation that was passed over is an error (`strict_ops`).

        Raises:
            PlatformError: the platform fails to say what it offers.

        """
        own = _offers(platform, "ops", platform.ops, OpImpl)
        for impl in own:
            if impl.op not in OPS and impl.api_version <= API_VERSION:
                raise PlatformError(
                    f"platform {platform.name!r} offers the unknown op {impl.op!r}{nearest(impl.op, OPS)}"
                )
        offered = [*own, *shared_ops, *reference_ops()]
        self._ops: dict[str, list[OpImpl]] = {name: [] for name in OPS}
        for impl in sorted(offered, key=lambda impl: TIERS.index(impl.tier)):
            if impl.op in self._ops:  # an op of a later minor version of the contract is none of ours
                self._ops[impl.op].append(impl)
        self._backends: list[AttentionBackend] = [
            *_offers(platform, "attention_backends", platform.attention_backends, AttentionBackend),
            ReferenceAttention(platform.device),
        ]
        self._platform_name = platform.name
        self._strict = strict
        self._frozen = False
        self._resolved: dict[OpSignature, ResolvedOp] = {}
        self._attention: dict[AttentionSpec, tuple[AttentionBackend, ManifestRow]] = {}

    def resolve(self, signature: OpSignature) -> ResolvedOp:
        """The first implementation that serves `signature`; the same object for the same signature.

        Raises:
            UnsupportedError: none serves it; the message has each one's reasons.
            PlatformError: strict, and a faster one was passed over.
            RuntimeError: frozen, and the signature is new.

        """
        if signature in self._resolved:
            return self._resolved[signature]
        self._refuse_when_frozen(str(signature))
        needed = OPS[signature.op].version_for(signature)
        skipped: list[Skipped] = []
        for impl in self._ops[signature.op]:
            known = impl.api_version >= needed
            answer = _ask(impl.supports, signature) if known else _too_old(impl.api_version, needed)
            if answer:
                self._refuse_fallback(str(signature), impl.provider, impl.tier, skipped)
                resolved = ResolvedOp(impl.fn, impl, tuple(skipped))
                self._resolved[signature] = resolved
                return resolved
            skipped.append(Skipped(impl.provider, impl.tier, answer.reasons))
        raise self._unserved(str(signature), skipped)

    def resolve_attention(self, spec: AttentionSpec) -> AttentionBackend:
        """The first attention backend that serves `spec`: the platform's in its order, then the reference.

        Raises:
            UnsupportedError, PlatformError, RuntimeError: as `resolve`.

        """
        if spec in self._attention:
            return self._attention[spec][0]
        call = _attention_call(spec)
        self._refuse_when_frozen(call)
        skipped: list[Skipped] = []
        for backend in self._backends:
            tier: Tier = "reference" if type(backend) is ReferenceAttention else "native"
            known = backend.api_version >= spec.version
            answer = _ask(backend.supports, spec) if known else _too_old(backend.api_version, spec.version)
            if answer:
                self._refuse_fallback(call, backend.name, tier, skipped)
                row = ManifestRow(call, backend.name, tier, "", backend.row_invariant, False, tuple(skipped))
                self._attention[spec] = backend, row
                return backend
            skipped.append(Skipped(backend.name, tier, answer.reasons))
        raise self._unserved(call, skipped)

    def unused(self) -> "OpResolver":
        """One of the same offers that has resolved nothing yet: what it resolves is in no manifest of this one."""
        other = copy(self)
        other._strict, other._frozen, other._resolved, other._attention = False, False, {}, {}
        return other

    def freeze(self) -> None:
        """From now on only what was resolved is served, so that nothing is chosen while requests run."""
        self._frozen = True

    @property
    def manifest(self) -> Manifest:
        """What was resolved so far."""
        rows = [
            ManifestRow(
                str(signature),
                op.impl.provider,
                op.impl.tier,
                op.impl.version,
                op.impl.row_invariant,
                op.impl.graph_safe,
                op.skipped,
            )
            for signature, op in self._resolved.items()
        ]
        rows += [row for _, row in self._attention.values()]
        return Manifest(tuple(sorted(rows, key=lambda row: row.call)))

    def _refuse_when_frozen(self, call: str) -> None:
        if self._frozen:
            raise RuntimeError(f"{call} is asked for after the op table was frozen; resolve it while the model loads")

    def _refuse_fallback(self, call: str, provider: str, tier: Tier, skipped: Sequence[Skipped]) -> None:
        faster = [s for s in skipped if TIERS.index(s.tier) < TIERS.index(tier)]
        if self._strict and faster:
            raise PlatformError(
                f"{call} would fall back to {provider} ({tier}), and strict_ops is set; "
                f"passed over: {', '.join(map(str, faster))}"
            )

    def _unserved(self, call: str, skipped: Sequence[Skipped]) -> UnsupportedError:
        reasons = ", ".join(map(str, skipped))
        return UnsupportedError(f"nothing on platform {self._platform_name} serves {call}: {reasons}")


def _too_old(written_for: tuple[int, int], needed: tuple[int, int]) -> Support:
    old, new = ".".join(map(str, written_for)), ".".join(map(str, needed))
    return Support.no(f"written for contract {old}, the call uses what {new} added")


def _offers(platform: Platform, hook: str, ask: Callable[[], list[T]], kind: type) -> list[T]:
    """What a platform's hook returns.

    Raises:
        PlatformError: it raised, or returned something else.

    """
    try:
        offered = ask()
    except Exception as error:
        raise PlatformError(f"platform {platform.name!r} failed in {hook}(): {one_line(error)}") from error
    if not isinstance(offered, list | tuple) or not all(isinstance(item, kind) for item in offered):
        raise PlatformError(f"platform {platform.name!r} failed in {hook}(): a list of {kind.__name__} is needed")
    return list(offered)


def _ask(supports: Callable[[T], Support], call: T) -> Support:
    """The answer, or a no that says how the question failed: a faulty predicate must not hide the next one."""
    try:
        answer = supports(call)
    except Exception as error:
        return Support.no(f"its supports() raised {one_line(error)}")
    if not isinstance(answer, Support):
        return Support.no(f"its supports() returned {type(answer).__name__}, a Support is needed")
    return answer


def _attention_call(spec: AttentionSpec) -> str:
    kind = "latent" if spec.latent else f"{spec.num_heads}/{spec.num_kv_heads} heads"
    parts = [
        str(spec.dtype).removeprefix("torch."),
        f"kv={str(spec.kv_dtype).removeprefix('torch.')}",
        kind,
        f"head_size={spec.head_size}",
        f"block_size={spec.block_size}",
    ]
    parts += [f"window={spec.window}"] if spec.window is not None else []
    parts += [f"softcap={spec.softcap:g}"] if spec.softcap is not None else []
    parts += ["sinks"] if spec.sinks else []
    return f"attention({', '.join(parts)})"
