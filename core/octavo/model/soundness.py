"""Whether a config's sizes can be, and a spec's values are of their types: both come from somebody else's files."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from octavo.contract import DecoderSpec, Moe
from octavo.errors import ModelError, shown
from octavo.model.config import ConfigView

__all__ = ["check_sizes", "check_spec"]

# Far over what any model has. A spec spells out layers, rotary frequencies and experts one by one, so that building
# one for larger numbers would take the machine's memory before anything could be compared with the checkpoint.
LARGEST = {
    "num_hidden_layers": 1 << 12,
    "hidden_size": 1 << 20,
    "head_dim": 1 << 16,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
}

FROM_ZERO = {"offset"}  # integers that may be 0; all others count or measure something that is there


def check_sizes(c: ConfigView) -> None:
    """Refuse a config whose spec could not be built.

    Raises:
        ModelError: names the size, and how large it may be.

    """
    for name, most in LARGEST.items():
        size = c.get(name)
        if isinstance(size, int | float) and not size <= most:
            raise ModelError(f"{name} must be at most {most}, it is {shown(size)}")


def check_spec(spec: DecoderSpec) -> None:
    """Refuse a spec that holds what its types do not say, or mixtures that have too few experts to choose from.

    Raises:
        ModelError: names the first such value, and what it must be.

    """
    for name, value, kind in _values(spec, seen=set()):
        if not _fits(value, kind, name.rpartition(".")[2]):
            raise ModelError(f"{name} must be {_words(kind)}, the config makes it {shown(value)}")
    for moe in dict.fromkeys(layer.mlp for layer in spec.layers if isinstance(layer.mlp, Moe)):
        _check_choice(moe)


def _check_choice(moe: Moe) -> None:
    """Refuse a mixture that would choose experts, or groups of them, that are not there."""
    num_left, groups = moe.num_experts, moe.groups
    if groups:
        if moe.num_experts % groups.num_groups:
            raise ModelError(f"{moe.num_experts} experts cannot be {groups.num_groups} groups of one size")
        size = moe.num_experts // groups.num_groups
        _check_at_most("mlp.groups.num_kept", groups.num_kept, groups.num_groups, "the groups")
        _check_at_most("mlp.groups.top_per_group", groups.top_per_group, size, "the experts of a group")
        num_left = groups.num_kept * size
    _check_at_most("mlp.top_k", moe.top_k, num_left, "the experts of the groups kept" if groups else "the experts")


def _check_at_most(name: str, value: int, most: int, of: str) -> None:
    if value > most:
        raise ModelError(f"{name} must be at most {most}, {of}, the config makes it {value}")


def _values(part: Any, seen: set[int], where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, value, type) of every leaf. Layers share most of their parts, so each object is looked at once."""
    if id(part) in seen:
        return
    seen.add(id(part))
    kinds = get_type_hints(type(part))
    for field in fields(part):
        value, name = getattr(part, field.name), f"{where}{field.name}"
        if is_dataclass(value):
            yield from _values(value, seen, f"{name}.")
        elif isinstance(value, tuple) and value and all(map(is_dataclass, value)):
            for one in value:
                yield from _values(one, seen, where)
        else:
            yield name, value, kinds[field.name]


def _fits(value: Any, kind: Any, name: str) -> bool:
    if get_origin(kind) in (Union, UnionType):
        return any(_fits(value, one, name) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and bool(value) and all(_fits(one, get_args(kind)[0], name) for one in value)
    if kind is bool:
        return value in (True, False)  # 0 and 1 do
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and (0 if name in FROM_ZERO else 1) <= value
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind)


def _words(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(one) for one in get_args(kind))
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"some, each {_words(get_args(kind)[0])}"
    words = {int: "a positive integer", float: "a finite number", bool: "true or false", NoneType: "null"}
    return words.get(kind, str(getattr(kind, "__name__", kind)))
