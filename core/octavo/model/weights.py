"""From a checkpoint to slots: what fills each slot is found and checked first, from headers, then read.

Memory: a few tensors of the checkpoint at a time, one a thread, beside the weights themselves.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from math import prod

import torch
from tqdm import tqdm

from octavo.contract import DecoderSpec, QuantizedWeight, Weight
from octavo.errors import ModelError
from octavo.model.checkpoint import Checkpoint
from octavo.model.names import REORDER, NameTable, Part
from octavo.model.precision import DENSE, Precision
from octavo.model.quantize import quantize
from octavo.model.slots import Slot, slots

__all__ = ["Filling", "dummy_weights", "makes_4_bits", "plan_weights", "read_weights"]

DUMMY_STD = 0.02
MAX_THREADS = 8
# Old writers stored the tables of rotary positions; models of several parts bring what looks and listens.
ALWAYS_IGNORED = (
    r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector|audio_tower)\..*",
)


@dataclass(frozen=True)
class Source:
    """A tensor of the checkpoint and where it goes.

    Attributes:
        name: of the tensor.
        part: how it is stored.
        rows: which rows of the target's view it fills.
        index: which entry of the target's first axis, for tensors that are one of many; or None.

    """

    name: str
    part: Part
    rows: slice
    index: int | None = None


@dataclass(frozen=True)
class Filling:
    """A tensor to be made: a slot's, or its bias.

    Attributes:
        name: its key among the weights.
        shape: of it.
        view: the shape as which sources see it: the same, or with an axis of groups before that of rows.
        row_axis: the axis of the view that `Source.rows` slices.
        head_size: for reorderings.
        sources: what fills it; rows that none fills are zero.
        dtype: None for the weights' common dtype.
        role: the slot's, see `Slot`.

    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    row_axis: int
    head_size: int
    sources: tuple[Source, ...]
    dtype: torch.dtype | None
    role: str = "float"


def plan_weights(spec: DecoderSpec, names: NameTable, checkpoint: Checkpoint) -> tuple[Filling, ...]:
    """What fills each slot of `spec`. Reads no weights.

    Raises:
        ModelError: a tensor is missing, does not fit, or has no place; one line with found and expected.
        UnsupportedError: a tensor is stored in a type that is not read.

    """
    root = names.root(checkpoint.shapes)
    plan = [filling for slot in slots(spec) for filling in _fillings(spec, slot, names, root, checkpoint)]
    used = {source.name for filling in plan for source in filling.sources}
    for name in sorted(used):
        checkpoint.check_readable(name)
    _refuse_extra(spec, names, root, checkpoint, used)
    return tuple(plan)


def read_weights(
    plan: Sequence[Filling],
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    precision: Precision = DENSE,
    importance: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Weight]:
    """The weights by slot name, see `slots`. `progress` shows a bar on stderr, `importance` [K] of columns, by slot
    name, is for those that are made of 4 bits, see `quantize`.
    """
    counts = importance or {}

    def read_one(filling: Filling) -> Weight:
        packed = _read_quantized(filling, checkpoint, precision, counts.get(filling.name))
        return _read(filling, checkpoint, filling.dtype or dtype, device) if packed is None else packed.to(device)

    with _pool() as pool:
        read = pool.map(read_one, plan)
        bar = tqdm(read, desc="Loading weights", total=len(plan), unit="tensor", disable=not progress)
        return {filling.name: tensor for filling, tensor in zip(plan, bar, strict=True)}


def dummy_weights(
    spec: DecoderSpec,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    precision: Precision = DENSE,
) -> dict[str, Weight]:
    """Random weights for every slot that a checkpoint must have; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Weight] = {}
    for slot in tqdm(slots(spec), desc="Making weights", unit="tensor", disable=not progress):
        if slot.optional:
            continue
        if slot.norm:
            values = torch.full(slot.shape, 1.0 - slot.norm.weight_offset)
        else:
            values = torch.empty(slot.shape).normal_(0.0, DUMMY_STD, generator=generator)
        if made := precision.made(slot.role):
            weights[slot.name] = quantize(values.flatten(0, -2), made).to(device)
        else:
            weights[slot.name] = values.to(device=device, dtype=slot.dtype or dtype)
    return weights


# ---- finding what fills a slot


def _fillings(
    spec: DecoderSpec, slot: Slot, names: NameTable, root: tuple[str, str], checkpoint: Checkpoint
) -> Iterator[Filling]:
    options = names.options(slot, root)
    parts = next((option for option in options if all(_first_weight(part, checkpoint) for part in option)), None)
    if parts is None:
        if not slot.optional:
            raise _missing(slot, options, checkpoint)
        return
    layer = spec.layers[slot.layer or 0].attn
    head_size = getattr(layer, "head_size", 0)
    sizes = slot.parts if len(parts) > 1 else ()
    rows = _row_slices(sizes)
    row_axis = -1 if slot.norm or len(slot.shape) == 1 else -2
    view, bias_view = slot.shape, slot.bias_shape
    if sizes and slot.groups > 1:
        view = (slot.groups, sum(sizes), slot.shape[-1])
    weights, biases = [], []
    for part, span in zip(parts, rows, strict=True):
        counted = part.is_counted
        for n in range(slot.shape[0]) if counted else (None,):
            one = part if n is None else part.at(n)
            weight, bias = checkpoint.weight(one), checkpoint.bias(one)
            if weight is None:
                raise _missing(slot, [[one]], checkpoint)
            one = replace(one, transpose=one.transpose and weight not in checkpoint.rows_first)
            source = Source(weight, one, span, n)
            _check_shape(slot.name, _expected(view, row_axis, source), checkpoint, source)
            weights.append(source)
            if bias is not None and slot.has_bias:
                source = Source(bias, one, span, n)
                _check_shape(f"{slot.name}.bias", _expected(bias_view, -1, source), checkpoint, source)
                biases.append(source)
        if counted and checkpoint.weight(part.at(slot.shape[0])):
            raise ModelError(
                f"{checkpoint.where}: {slot.name} has {slot.shape[0]} parts by its config, "
                f"the checkpoint has {checkpoint.weight(part.at(slot.shape[0]))} too"
            )
    yield Filling(slot.name, slot.shape, view, row_axis, head_size, tuple(weights), slot.dtype, slot.role)
    if biases:
        yield Filling(f"{slot.name}.bias", bias_view, bias_view, -1, head_size, tuple(biases), slot.dtype)


def _first_weight(part: Part, checkpoint: Checkpoint) -> str | None:
    return checkpoint.weight(part.at(0) if part.is_counted else part)


def _row_slices(sizes: Sequence[int]) -> list[slice]:
    """Rows of each part; all of them where the slot comes as one tensor."""
    if not sizes:
        return [slice(None)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _expected(view: tuple[int, ...], row_axis: int, source: Source) -> tuple[int, ...]:
    """The stored shape of a source that fits a target seen as `view`."""
    stored = list(view)
    stored[row_axis] = len(range(view[row_axis])[source.rows])
    if source.part.transpose and row_axis == -2:
        stored[-2:] = stored[:-3:-1]
    return tuple(stored[1:] if source.index is not None else stored)


def _check_shape(target: str, expected: tuple[int, ...], checkpoint: Checkpoint, source: Source) -> None:
    found = checkpoint.shapes[source.name]
    if [n for n in found if n != 1] != [n for n in expected if n != 1]:
        raise ModelError(
            f"{checkpoint.where}: tensor {source.name} has shape {list(found)}, expected is {list(expected)} "
            f"for {target}; the config and the weights are of different models"
        )


def _missing(slot: Slot, options: Sequence[Sequence[Part]], checkpoint: Checkpoint) -> ModelError:
    wanted = " or ".join(" + ".join(part.at(0).name for part in option) for option in options)
    lacking = next((p.at(0).name for option in options for p in option if not _first_weight(p, checkpoint)), slot.key)
    near = get_close_matches(lacking, checkpoint.shapes, n=2, cutoff=0.7)
    hint = f"; near it has {', '.join(near)}" if near else ""
    if not wanted:
        return ModelError(f"{checkpoint.where}: no name is known for {slot.name} {list(slot.shape)} in such a file")
    return ModelError(
        f"{checkpoint.where}: tensor {lacking} is missing; expected is {wanted} "
        f"to fill {slot.name} {list(slot.shape)}{hint}"
    )


def _refuse_extra(
    spec: DecoderSpec, names: NameTable, root: tuple[str, str], checkpoint: Checkpoint, used: set[str]
) -> None:
    extra = set(checkpoint.shapes) - used
    if spec.tied_embeddings:  # some writers store the head again
        for option in names.options(Slot("head", ()), root):
            extra -= {checkpoint.weight(part) for part in option}
    ignored = [pattern.replace("{num_layers}", str(len(spec.layers))) for pattern in (*ALWAYS_IGNORED, *names.ignored)]
    unknown = sorted(name for name in extra if not any(re.fullmatch(pattern, name) for pattern in ignored))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise ModelError(
            f"{checkpoint.where}: {len(unknown)} of {len(checkpoint.shapes)} tensors have no place in the model that "
            f"its config describes: {', '.join(unknown[:3])}{more}; {len(used)} were expected"
        )


# ---- reading


def _read(filling: Filling, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    covered = sum(len(range(filling.view[filling.row_axis])[s.rows]) for s in filling.sources)
    counted = any(s.index is not None for s in filling.sources)
    num_rows = filling.view[filling.row_axis] * (filling.view[0] if counted else 1)
    make = torch.empty if covered == num_rows else torch.zeros
    target = make(filling.shape, dtype=dtype, device=device)
    view = target.view(filling.view)
    for source in filling.sources:
        place = view if source.index is None else view[source.index]
        axis = place.ndim + filling.row_axis
        place = place.narrow(axis, source.rows.start or 0, len(range(place.shape[axis])[source.rows]))
        values = checkpoint.read(source.name)
        if source.part.transpose and filling.row_axis == -2:
            values = values.transpose(-1, -2)
        values = values.reshape(place.shape)
        if source.part.reorder:
            values, place = values.movedim(axis, 0), place.movedim(axis, 0)
            values = REORDER[source.part.reorder](values, filling.head_size)
            place = place.view(values.shape)
        place.copy_(values)
    return target


def makes_4_bits(plan: Sequence[Filling], checkpoint: Checkpoint, precision: Precision) -> bool:
    """Whether any matrix is rounded to 4 bits as it is read."""
    return any(
        precision.made(filling.role) == "int4" and not all(_kept(filling, checkpoint, precision)) for filling in plan
    )


def _kept(filling: Filling, checkpoint: Checkpoint, precision: Precision) -> list[bool]:
    """Which of its sources stay packed as they are stored."""
    return [
        not source.part.transpose and precision.keeps(checkpoint.packed_format(source.name), filling.role)
        for source in filling.sources
    ]


def _read_quantized(
    filling: Filling, checkpoint: Checkpoint, precision: Precision, importance: torch.Tensor | None
) -> QuantizedWeight | None:
    """Rows below each other, those that the checkpoint has packed as they are where that may be; None for dense."""
    made = precision.made(filling.role)
    kept = _kept(filling, checkpoint, precision)
    if not made and not all(kept):
        return None
    try:
        parts = [
            checkpoint.read_packed(source.name) if keep else _quantized(filling, source, checkpoint, made, importance)
            for source, keep in zip(filling.sources, kept, strict=True)
        ]
        joined = QuantizedWeight.concatenate(parts) if len(parts) > 1 else parts[0]
    except ValueError:  # as they are stored they have no form in common
        if not made:
            return None
        parts = [_quantized(filling, source, checkpoint, made, importance) for source in filling.sources]
        joined = QuantizedWeight.concatenate(parts)
    if joined.format not in precision.formats:
        return None
    order = _row_order(filling)
    return joined if order is None else joined[order]


def _quantized(
    filling: Filling, source: Source, checkpoint: Checkpoint, made: str | None, importance: torch.Tensor | None
) -> QuantizedWeight:
    assert made, "what is not kept is made"
    values = checkpoint.read(source.name)
    if source.part.transpose:
        values = values.transpose(-1, -2)
    return quantize(values.reshape(-1, filling.shape[-1]), made, importance)


def _row_order(filling: Filling) -> torch.Tensor | None:
    """Which row of the sources, one below the other, is the n-th of the slot's; None where they are in order."""
    rows = torch.arange(prod(filling.view[:-1])).view(filling.view[:-1])
    order, begin = torch.full((rows.numel(),), -1), 0
    for source in filling.sources:
        place = rows if source.index is None else rows[source.index]
        place = place.narrow(-1, source.rows.start or 0, len(range(place.shape[-1])[source.rows]))
        stored = torch.arange(begin, begin := begin + place.numel()).view(place.shape)
        if source.part.reorder:
            stored = REORDER[source.part.reorder](stored.movedim(-1, 0), filling.head_size)
            place = place.movedim(-1, 0)
        order[place.flatten()] = stored.flatten()
    assert int(order.min()) >= 0, f"{filling.name} has rows that nothing fills"
    return None if torch.equal(order, rows.flatten()) else order


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """A thread a processor, in each of which torch keeps to that one: copying waits for memory and for files, and
    threads of torch's own would wait for each other as well.
    """
    before = torch.get_num_threads()
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)
