"""What engines are still to do fits the contract as it stands: each is tried here, and no signature changes for it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from contract.future.toy import (
    BLOCK,
    CPU,
    HIDDEN,
    Link,
    all_rows,
    attention_spec,
    batch_of,
    cut,
    logits_of,
    make_program,
    make_sequences,
    make_weights,
    run,
)
from doubles.platforms import ToyPlatform

from octavo.contract import (
    API_VERSION,
    AddedField,
    Attention,
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    DecoderSpec,
    KVCache,
    LatentAttention,
    Layer,
    Mlp,
    Moe,
    Norm,
    OpDefinition,
    OpImpl,
    OpSignature,
    Rope,
    RowMode,
    Shard,
    StepBatch,
    Support,
)
from octavo.contract.reference_attention import ReferenceAttention
from octavo.hardware.resolve import OpResolver
from octavo.model.generic import GenericProgram
from octavo.model.kv_groups import kv_groups
from octavo.model.slots import slots


def whole(num_layers: int = 2, num_adapters: int = 0, **fields: Any) -> torch.Tensor:
    """[17, V] logits of three sequences on one device."""
    program = make_program(make_weights(num_layers, num_adapters), num_layers)
    return logits_of(run(program, [(s, len(s.token_ids)) for s in make_sequences(9, 1, 7)], **fields))


def test_two_ranks_share_each_layer() -> None:
    """A rank knows its slice by `CompileRequest.shard`, and joins the others by means of the platform's own."""
    link, weights = Link(2), make_weights(2)
    shards = [Shard(rank, 2) for rank in range(2)]
    programs = [make_program(cut(weights, shard), 2, shard, link) for shard in shards]
    assert [program.caches[0].spec.num_heads for program in programs] == [2, 2]
    with ThreadPoolExecutor(2) as pool:
        steps = [
            pool.submit(run, program, [(s, len(s.token_ids)) for s in make_sequences(9, 1, 7)]) for program in programs
        ]
        found = [logits_of(step.result()) for step in steps]
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], whole(), atol=1e-6, rtol=1e-6)


def test_stages_of_a_pipeline_hand_on_hidden_states() -> None:
    weights = make_weights(2)
    first, last = (make_program(weights, 1, Shard(stage=stage, num_stages=2)) for stage in range(2))
    sequences = make_sequences(9, 1, 7)
    ids, positions, attention = batch_of([(s, len(s.token_ids)) for s in sequences])
    batch = StepBatch(ids, positions, [attention])
    between = first.submit(batch, all_rows(0)).result().hidden_out
    assert between is not None and between.shape == (17, HIDDEN)
    output = last.submit(replace(batch, hidden_in=between), all_rows(17)).result()
    assert torch.equal(logits_of(output), whole())


def test_each_row_has_an_adapter_of_its_own() -> None:
    adapters = torch.tensor([1, -1, 0], dtype=torch.int32)
    mixed = whole(num_adapters=2, adapter_ids=adapters)
    parts = [whole(num_adapters=2, adapter_ids=torch.full((3,), a, dtype=torch.int32)) for a in (1, -1, 0)]
    rows = (slice(0, 9), slice(9, 10), slice(10, 17))
    for part, row in zip(parts, rows, strict=True):
        torch.testing.assert_close(mixed[row], part[row])
    torch.testing.assert_close(parts[1], whole(num_adapters=2))
    assert not torch.allclose(parts[0][rows[0]], parts[1][rows[0]])


def test_a_draft_is_verified_in_one_step_and_taken_back() -> None:
    """GREEDY rows at each drafted position; what is refused is written over by the next step."""
    program = make_program(make_weights(2), 2)

    def greedy_after(token_ids: list[int]) -> int:
        (fresh,) = make_sequences(12)
        fresh.token_ids, fresh.blocks = token_ids, list(range(40, 52))
        return int(logits_of(run(program, [(fresh, len(token_ids))]))[-1].argmax())

    (sequence,) = make_sequences(6)
    prompt = list(sequence.token_ids)
    run(program, [(sequence, 6)])
    right = []
    for _ in range(3):
        right.append(greedy_after(prompt + right))
    wrong = (right[2] + 1) % 40
    sequence.token_ids += [right[0], right[1], wrong, 5]
    ids, positions, attention = batch_of([(sequence, 4)])
    output = program.submit(StepBatch(ids, positions, [attention]), all_rows(4, RowMode.GREEDY)).result()
    assert output.greedy_ids is not None
    assert output.greedy_ids[:2].tolist() == right[1:], "after the first drafted token comes the second, and so on"
    sequence.done -= 2  # the third is refused, and the fourth with it
    sequence.token_ids = prompt + right
    found = int(logits_of(run(program, [(sequence, 1)]))[-1].argmax())
    assert found == greedy_after(prompt + right)


def test_embeddings_stand_in_for_tokens() -> None:
    weights = make_weights(2)
    ids = torch.tensor([i for s in make_sequences(9, 1, 7) for i in s.token_ids])
    assert torch.equal(whole(input_embeds=weights["embedding"][ids]), whole())


NORM = Norm(1e-5)
ROPE = Rope(tuple(1 / 10 ** (i / 2) for i in range(4)))
FULL = Attention(4, 2, 8, 8**-0.5, ROPE)
DENSE, EXPERTS = Mlp(24, "silu"), Moe(4, 2, Mlp(12, "silu"))
LATENT = LatentAttention(4, None, kv_rank=12, nope_dim=8, v_dim=8, scale=0.25, rope=ROPE, norm=NORM)


def decoder(*layers: tuple[Attention | LatentAttention, Mlp | Moe]) -> DecoderSpec:
    made = tuple(Layer(attn, mlp, attn_pre=NORM, mlp_pre=NORM) for attn, mlp in layers)
    return DecoderSpec(40, 16, made, NORM, tied_embeddings=True)


DECODERS = {
    "experts": (decoder((FULL, DENSE), (FULL, EXPERTS)), 1),
    "two KV groups": (decoder((FULL, DENSE), (replace(FULL, window=5), DENSE)), 2),
    "latent KV": (decoder((LATENT, DENSE), (LATENT, EXPERTS)), 1),
    "all of them": (decoder((LATENT, DENSE), (replace(FULL, window=5), EXPERTS), (FULL, DENSE)), 3),
}


@pytest.mark.parametrize("name", DECODERS)
def test_specs_run_on_a_platform_that_knows_nothing_of_them(name: str) -> None:
    """In chunks beside others they give what they give whole: each group has its cache, table and plan."""
    spec, num_groups = DECODERS[name]
    draw = torch.Generator().manual_seed(0)
    weights = {
        slot.name: (torch.randn(slot.shape, generator=draw) / slot.shape[-1] ** 0.5).to(slot.dtype or torch.float64)
        for slot in slots(spec)
        if not slot.optional
    }
    platform = ToyPlatform()
    groups = kv_groups(spec, block_size=BLOCK, dtype=torch.float64, kv_dtype=torch.float64)
    assert len(groups) == num_groups

    def fresh() -> GenericProgram:
        resolver = OpResolver(platform)
        program = GenericProgram(
            spec, weights, dtype=torch.float64, device=CPU, groups=groups, resolver=resolver, max_model_len=64
        )
        program.bind([resolver.resolve_attention(group.spec).allocate(group.spec, 64) for group in groups])
        return program

    def step(program: GenericProgram, work: Any) -> torch.Tensor:
        ids, positions, attention = batch_of(work)
        return logits_of(
            program.submit(StepBatch(ids, positions, [attention] * num_groups), all_rows(len(ids))).result()
        )

    expected = step(fresh(), [(s, len(s.token_ids)) for s in make_sequences(13, 6)])
    long, short = make_sequences(13, 6)
    program = fresh()
    parts = [step(program, [(long, 7)]), step(program, [(short, 6), (long, 5)]), step(program, [(long, 1)])]
    found = torch.cat((parts[0], parts[1][6:], parts[2], parts[1][:6]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@dataclass(frozen=True)
class StateSpec(AttentionSpec):
    """A group as a later minor version may have it: a block holds a request's state, and its tokens are not kept."""

    state_size: int = 0
    added = (AddedField("state_size", (0, 11), 0),)


class StateBackend(AttentionBackend):
    """A leaky sum of the values of a row: out[t] = value[t] + 0.5 out[t - 1]. A row's first block is its state."""

    name = "state"
    api_version = (0, 11)

    def supports(self, spec: AttentionSpec) -> Support:
        size = getattr(spec, "state_size", 0)
        return Support.yes() if size else Support.no("attention, built for states")

    def block_bytes(self, spec: AttentionSpec) -> int:
        return 8 * spec.num_layers * spec.num_kv_heads * spec.value_size

    def allocate(self, spec: AttentionSpec, num_blocks: int) -> KVCache:
        shape = (num_blocks, spec.num_kv_heads, spec.value_size)
        return KVCache(spec, num_blocks, tuple(torch.zeros(shape, dtype=spec.dtype) for _ in range(spec.num_layers)))

    def plan(self, cache: KVCache, batch: AttentionBatch) -> Any:
        return cache, batch, {}

    def write(self, plan: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        plan[2][layer] = value

    def attend(self, plan: Any, layer: int, query: Any, out: torch.Tensor, sinks: Any = None) -> None:
        cache, batch, values = plan
        states = cache.tensors[layer]
        for row in range(batch.num_rows):
            first, last = batch.query_start_loc_host[row : row + 2]
            block = int(batch.block_table_host[row, 0])
            begins = batch.seq_lens_host[row] == last - first
            state = torch.zeros_like(states[block]) if begins else states[block]
            for token in range(first, last):
                state = values[layer][token] + 0.5 * state
                out[token] = state
            states[block] = state


def test_a_request_has_a_state() -> None:
    """Blocks move as before, and a backend that knows nothing of states is never offered such a group."""
    spec = StateSpec(**vars(attention_spec(1, num_heads=2)), state_size=16)
    assert spec.version == (0, 11)
    old, new = ReferenceAttention(CPU), StateBackend()
    old.api_version = (0, 9)
    resolver = OpResolver(ToyPlatform(backends=[old, new]))
    backend = resolver.resolve_attention(spec)
    assert backend is new
    (row,) = resolver.manifest.rows
    assert row.skipped[0].reasons == ("written for contract 0.9, the call uses what 0.11 added",)
    assert resolver.resolve_attention(attention_spec(1)) is old

    cache, value = backend.allocate(spec, 64), torch.randn(9, 2, 8, dtype=torch.float64)

    def step(first: int, last: int, block: int) -> torch.Tensor:
        (sequence,) = make_sequences(9)
        sequence.done, sequence.blocks = first, [block] * 9
        _, _, batch = batch_of([(sequence, last - first)])
        out = torch.empty(last - first, 2, 8, dtype=torch.float64)
        backend.write_attend(backend.plan(cache, batch), 0, out, value[first:last], value[first:last], out)
        return out

    expected = step(0, 9, 3)
    parts = [step(0, 4, 5)]
    host = backend.allocate_host(spec, 2)
    backend.swap_blocks(cache, host, [(5, 1)])
    cache.tensors[0][5] = float("nan")
    backend.swap_blocks(host, cache, [(1, 7)])
    parts.append(step(4, 9, 7))
    assert torch.equal(torch.cat(parts), expected)


def test_a_later_op_is_one_more_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of today passes over who offers it, and one that has it resolves it as any other."""
    from octavo.contract import OPS

    moe = OpImpl("moe", "toy", "native", lambda args: args, api_version=(API_VERSION[0], API_VERSION[1] + 1))
    OpResolver(ToyPlatform([moe]))
    monkeypatch.setitem(OPS, "moe", OpDefinition("moe", OPS["linear"].args, ("num_experts",)))
    signature = OpSignature("moe", torch.float32, "cpu", (("num_experts", 8),))
    assert OpResolver(ToyPlatform([moe])).resolve(signature).impl is moe
