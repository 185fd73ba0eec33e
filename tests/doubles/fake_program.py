"""A model whose tokens are a function of the sequence's own ids alone, over a real paged store.

What a transformer keeps as keys and values is here the token's id and its position. "Attention" reads a row's
ids back through its block table and folds them into one 64-bit state; the "head" turns the state into logits.
A wrong slot, table, copy or swap therefore changes tokens, and a read of a slot that was never written, of a
stray block or of another position raises `PoisonError` at once. `fake_logits` and `fake_greedy` say what a
sequence must give, without any engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import (
    API_VERSION,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    Capabilities,
    CompileRequest,
    KVCache,
    MemoryInfo,
    Platform,
    PlatformInfo,
    Program,
    RowMode,
    Rows,
    StepBatch,
    StepHandle,
    StepOutput,
    Support,
)

__all__ = [
    "FakeAttention",
    "FakePlatform",
    "FakeProgram",
    "PoisonError",
    "fake_greedy",
    "fake_logits",
    "fake_platform_info",
    "fake_spec",
]

POISON = -1  # stands for id and position in every slot that was never written
ALL_MODES = frozenset((RowMode.LOGITS, RowMode.GREEDY, RowMode.TOPK, RowMode.SCORE))
MULTIPLIER = 0x9E3779B97F4A7C15


class PoisonError(AssertionError):
    """A step read or wrote where it must not."""


def fake_spec(block_size: int, num_layers: int = 1) -> AttentionSpec:
    """One head of one dim, in int64: a key is a token's id, a value its position, an output the row's state."""
    return AttentionSpec(
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_size=1,
        value_size=1,
        block_size=block_size,
        dtype=torch.int64,
        kv_dtype=torch.int64,
        scale=1.0,
    )


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _states(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """[n] the state after each of the ids; reads ids up to there, and their order."""
    positions = np.arange(1, len(ids) + 1, dtype=np.uint64)
    words = _mix(ids.astype(np.uint64) + np.uint64(MULTIPLIER)) * (
        _mix(positions * np.uint64(MULTIPLIER)) | np.uint64(1)
    )
    return np.cumsum(words, dtype=np.uint64)


def _logits(states: npt.NDArray[np.uint64], vocab_size: int) -> npt.NDArray[np.float32]:
    """[n, V] in [-6, 6), by hash of state and id."""
    ids = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(MULTIPLIER)
    mixed: npt.NDArray[np.uint64] = _mix(_mix(states)[:, None] ^ ids[None, :])
    logits: npt.NDArray[np.float32] = (mixed >> np.uint64(40)).astype(np.float32)
    logits *= np.float32(12 / 2**24)
    logits -= np.float32(6)
    return logits


def fake_logits(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[np.float32]:
    """[V] float32: what the fake model says after these ids."""
    return _logits(_states(np.asarray(token_ids, np.int64))[-1:], vocab_size)[0]


def fake_greedy(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, eos_token_ids: frozenset[int] = frozenset()
) -> list[int]:
    """The tokens that temperature 0 must give after `prompt`, up to and with the first end-of-sequence id."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        ids.append(int(fake_logits(ids, vocab_size).argmax()))
        if ids[-1] in eos_token_ids:
            break
    return ids[len(prompt) :]


@dataclass(frozen=True)
class _Plan:
    cache: KVCache
    batch: AttentionBatch


class FakeAttention(AttentionBackend):
    """Layout of each layer's tensor: [B, block_size, 2] int64, token id and position, whatever the spec says.

    `nan_token`: a sequence that holds this id gets NaN logits; its state is 0.
    """

    name = "fake"

    def __init__(self, nan_token: int | None = None) -> None:
        self.nan_token = nan_token

    @property
    def row_invariant(self) -> Support:
        return Support.yes()

    def supports(self, spec: AttentionSpec) -> Support:
        return Support.yes()

    def block_bytes(self, spec: AttentionSpec) -> int:
        return spec.num_layers * spec.block_size * 16

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        shape = (num_blocks, spec.block_size, 2)
        return KVCache(spec, num_blocks, tuple(torch.full(shape, POISON) for _ in range(spec.num_layers)))

    def allocate_host(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        return self.allocate(spec, num_blocks)

    def plan(self, cache: KVCache, batch: AttentionBatch) -> _Plan:
        starts, slots = batch.query_start_loc_host, batch.slot_mapping_host
        written = slots[slots >= 0]
        if starts[0] != 0 or starts[-1] != len(slots) or (np.diff(starts) < 1).any():
            raise PoisonError(f"query_start_loc {starts.tolist()} does not cut {len(slots)} tokens into rows")
        if len(np.unique(written)) != len(written):
            raise PoisonError(f"two tokens of a step go to one slot: {slots.tolist()}")
        if (slots < -1).any() or (slots >= cache.num_blocks * cache.spec.block_size).any():
            raise PoisonError(f"a slot is outside the cache: {slots.tolist()}")
        for mirror, tensor in (
            (starts, batch.query_start_loc),
            (slots, batch.slot_mapping),
            (batch.seq_lens_host, batch.seq_lens),
            (batch.block_table_host, batch.block_table),
        ):
            if not np.array_equal(mirror, tensor.cpu().numpy()):
                raise PoisonError("a host mirror differs from its device tensor")
        return _Plan(cache, batch)

    def write(self, plan: _Plan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        slots = torch.from_numpy(plan.batch.slot_mapping_host)
        kept = slots >= 0
        storage = plan.cache.tensors[layer].view(-1, 2)
        storage[slots[kept]] = torch.stack((key[kept, 0, 0], value[kept, 0, 0]), -1)

    def attend(
        self, plan: _Plan, layer: int, query: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        batch = plan.batch
        for row in range(batch.num_rows):
            first, last = int(batch.query_start_loc_host[row]), int(batch.query_start_loc_host[row + 1])
            ids = self._read(plan, layer, row)
            states = _states(ids)
            if self.nan_token is not None:
                states[np.cumsum(ids == self.nan_token) > 0] = 0
            out[first:last, 0, 0] = torch.from_numpy(states.view(np.int64)[len(ids) - (last - first) :])

    def _read(self, plan: _Plan, layer: int, row: int) -> npt.NDArray[np.int64]:
        """The ids that the row's table leads to; each must stand there with its own position."""
        block_size, length = plan.cache.spec.block_size, int(plan.batch.seq_lens_host[row])
        blocks = plan.batch.block_table_host[row, : -(-length // block_size)]
        if len(blocks) * block_size < length or ((blocks < 0) | (blocks >= plan.cache.num_blocks)).any():
            raise PoisonError(f"row {row} of {length} tokens reads blocks {blocks.tolist()}")
        stored = plan.cache.tensors[layer].numpy()[blocks].reshape(-1, 2)[:length]
        wrong = np.flatnonzero((stored[:, 0] == POISON) | (stored[:, 1] != np.arange(length)))
        if wrong.size:
            at = int(wrong[0])
            raise PoisonError(
                f"row {row} reads position {at} of {length} from block {blocks[at // block_size]} and finds"
                f" (id, position) = {tuple(stored[at].tolist())}"
            )
        return np.ascontiguousarray(stored[:, 0])


@dataclass
class _Handle:
    output: StepOutput | None
    error: Exception | None

    def result(self) -> StepOutput:
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output


@dataclass
class FakeProgram:
    """The program over `FakeAttention`, one layer a group.

    Attributes:
        groups: (backend, spec) of each KV group; every group must tell the same story.
        fail_next: raised by the next step, once, after its KV writes.
        step_tokens: number of tokens of each step so far.

    """

    groups: Sequence[tuple[FakeAttention, AttentionSpec]]
    vocab_size: int
    modes: frozenset[RowMode] = ALL_MODES
    row_invariant: Support = field(default_factory=Support.yes)
    caches: Sequence[KVCache] = ()
    fail_next: Exception | None = None
    step_tokens: list[int] = field(default_factory=list)

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        return 8 * max_tokens + 4 * max_rows * self.vocab_size

    def bind(self, kv_caches: Sequence[KVCache]) -> None:
        assert not self.caches, "bind is called once"
        assert [cache.spec for cache in kv_caches] == [spec for _, spec in self.groups]
        self.caches = kv_caches

    def submit(self, batch: StepBatch, rows: Rows) -> StepHandle:
        self.step_tokens.append(len(batch.token_ids))
        try:
            states = self._run(batch)
            if self.fail_next is not None:
                error, self.fail_next = self.fail_next, None
                raise error
            return _Handle(self._head(states, rows), None)
        except Exception as error:
            return _Handle(None, error)

    def _run(self, batch: StepBatch) -> npt.NDArray[np.uint64]:
        """[T] the state after each token of the step."""
        ids, positions = batch.token_ids, batch.positions
        if ((ids < 0) | (ids >= self.vocab_size)).any():
            raise PoisonError(f"token ids {ids.tolist()} of a vocabulary of {self.vocab_size}")
        found = []
        for (backend, spec), cache, attention in zip(self.groups, self.caches, batch.attention, strict=True):
            _check_positions(positions, attention)
            plan = backend.plan(cache, attention)
            for layer in range(spec.num_layers):
                out = torch.full((len(ids), 1, 1), POISON)
                key, value = ids[:, None, None], positions[:, None, None]
                backend.write_attend(plan, layer, positions[:, None, None], key, value, out)
                found.append(out[:, 0, 0])
        if any(not torch.equal(found[0], other) for other in found):
            raise PoisonError("the layers' caches differ")
        return found[0].numpy().view(np.uint64)

    def _head(self, states: npt.NDArray[np.uint64], rows: Rows) -> StepOutput:
        unknown = {int(m) for m in rows.mode} - {int(m) for m in self.modes}
        if unknown:
            raise PoisonError(f"row modes {sorted(unknown)} were never offered")
        wanted = states[rows.index]
        logits = _logits(wanted, self.vocab_size)
        logits[wanted == 0] = np.nan
        lines = {mode: rows.of(mode) for mode in ALL_MODES}
        wide = logits.astype(np.float64)
        with np.errstate(invalid="ignore"):
            logprobs = (wide - np.log(np.exp(wide).sum(-1, keepdims=True))).astype(np.float32)
        order = np.argsort(-logits, axis=-1, kind="stable")
        scored = lines[RowMode.SCORE]
        targets = rows.target[scored] if scored.size else np.zeros(0, np.int64)
        best = lines[RowMode.TOPK]
        found = order[best, : rows.k].astype(np.int64)
        return StepOutput(
            logits=torch.from_numpy(logits[lines[RowMode.LOGITS]]),
            greedy_ids=np.where(wanted == 0, -1, order[:, 0])[lines[RowMode.GREEDY]].astype(np.int64),
            topk_ids=found,
            topk_logprobs=np.take_along_axis(logprobs[best], found, -1),
            target_logprobs=logprobs[scored, targets],
            target_ranks=1 + (order[scored] == targets[:, None]).argmax(-1).astype(np.int64),
        )


def _check_positions(positions: torch.Tensor, attention: AttentionBatch) -> None:
    starts, lengths = attention.query_start_loc_host, attention.seq_lens_host
    expected = [p for r, n in enumerate(lengths) for p in range(n - (starts[r + 1] - starts[r]), n)]
    if positions.tolist() != expected:
        raise PoisonError(f"positions {positions.tolist()} do not end at seq_lens {lengths.tolist()}")


class FakePlatform(Platform):
    """A platform whose programs are `FakeProgram`s; unified memory of a given size.

    `compile` keeps its program in `self.program`, where a test finds it.
    """

    name = "fake"

    def __init__(
        self,
        *,
        memory: MemoryInfo | None = None,
        capabilities: Capabilities | None = None,
        modes: frozenset[RowMode] = ALL_MODES,
        row_invariant: Support | None = None,
        nan_token: int | None = None,
    ) -> None:
        self._memory = memory or MemoryInfo(free=1 << 30, total=1 << 30)
        self._capabilities = capabilities or Capabilities(
            dtypes=(torch.float32,), block_sizes=(4, 1, 2, 3, 8, 16), unified_memory=True
        )
        self._modes = modes
        self._row_invariant = Support.yes() if row_invariant is None else row_invariant
        self._attention = FakeAttention(nan_token)
        self.program: FakeProgram | None = None
        self.num_threads: int | None = None

    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        return self._memory

    def attention_backends(self) -> list[AttentionBackend]:
        return [self._attention]

    def compile(self, request: CompileRequest) -> Program | None:
        groups = [(self._attention, spec) for spec in request.attention]
        self.program = FakeProgram(groups, request.spec.vocab_size, self._modes, self._row_invariant)
        return self.program

    def diagnostics(self) -> Mapping[str, str]:
        return {"kind": "test double"}

    def set_num_threads(self, num_threads: int) -> None:
        self.num_threads = num_threads


def fake_platform_info(create: Callable[[int], Platform] | None = None) -> PlatformInfo:
    """What a plugin of this platform would announce."""
    return PlatformInfo(
        "fake", API_VERSION, True, "always there", create or (lambda index: FakePlatform()), 1, ("one",)
    )
