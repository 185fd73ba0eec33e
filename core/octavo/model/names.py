"""Name tables: which tensors of a checkpoint fill which slot, one table a family.

A table maps a slot's key ("attn.qkv") to an entry:

    "self_attn.q_proj self_attn.k_proj self_attn.v_proj"    three tensors, stacked by rows
    "mlp.gate | block_sparse_moe.gate"                      the first alternative that the checkpoint has
    "mlp.experts.{n}.down_proj"                             one tensor each n, put on a new first axis
    "attn.c_attn:transpose"                                 stored inputs by outputs
    "experts.gate_up_proj:transpose,even_rows_first"        and with its rows in another order, see `REORDER`
    "layer"                                                 what stands before the names of layer {i}

A name stands for the tensor `name.weight`, or else `name`; its bias is `name.bias` or `name_bias`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from octavo.model.slots import Slot

__all__ = ["REORDER", "SAVED_ALONE", "NameTable", "Part", "bias_name", "weight_name"]

# The roots under which a decoder's tensors may lie, as (what a table's names begin with, what stands there instead):
# as they are, beside a vision tower (two generations of them), or a decoder saved without its head.
SAVED_ALONE = ("model.", "")
ROOTS = (("", ""), ("", "language_model."), ("model.", "model.language_model."), SAVED_ALONE, ("transformer.", ""))


def _even_rows_first(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """Gate and up in turns (gpt_oss): all gates, then all ups."""
    return rows.view(-1, 2, *rows.shape[1:]).transpose(0, 1)


def _split_heads(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """Query, key and value of a head side by side (gpt_neox): all queries, then all keys, then all values."""
    return rows.view(-1, 3, head_size, *rows.shape[1:]).transpose(0, 1)


def _rope_halves(rows: torch.Tensor, head_size: int) -> torch.Tensor:
    """Pairs that rotate together side by side (GGUF of llama-like models): in the two halves of a head."""
    return rows.view(-1, head_size // 2, 2, *rows.shape[1:]).transpose(1, 2)


# Step of an entry -> from stored rows [rows, ...] and the head size to a view whose leading axes, flattened, are the
# rows in the order that a slot has.
REORDER: Mapping[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "even_rows_first": _even_rows_first,
    "split_heads": _split_heads,
    "rope_halves": _rope_halves,
}


@dataclass(frozen=True)
class Part:
    """One name of an entry.

    Attributes:
        name: of the tensor, less its suffix; may hold "{n}".
        transpose: stored inputs by outputs.
        reorder: a key of `REORDER`, applied to rows after transposing; or None.

    """

    name: str
    transpose: bool = False
    reorder: str | None = None

    def at(self, n: int) -> "Part":
        """With {n} filled in."""
        return Part(self.name.replace("{n}", str(n)), self.transpose, self.reorder)

    @property
    def is_counted(self) -> bool:
        """One tensor each n."""
        return "{n}" in self.name


@dataclass(frozen=True)
class NameTable:
    """The names of one family of checkpoints.

    Attributes:
        entries: slot key to entry.
        ignored: regular expressions of tensors that no program reads (masks); {num_layers} stands for their number.

    """

    entries: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def options(self, slot: Slot, root: tuple[str, str] = ROOTS[0]) -> list[list[Part]]:
        """The alternatives for a slot, each a list of parts with full names; none where the table lacks it."""
        old, new = root
        prefix = self.entries["layer"].replace("{i}", str(slot.layer)) if slot.layer is not None else ""
        options = []
        for option in self.entries.get(slot.key, "").split("|"):
            parts = []
            for word in option.split():
                name, _, listed = word.partition(":")
                steps = listed.split(",") if listed else []
                name = prefix + name
                name = new + name.removeprefix(old) if name.startswith(old) else name
                parts.append(Part(name, "transpose" in steps, next((s for s in steps if s in REORDER), None)))
            options += [parts] if parts else []
        return options

    def root(self, names: Collection[str]) -> tuple[str, str]:
        """Under which of `ROOTS` a checkpoint with these tensors keeps its embedding; the first if under none."""
        embedding = Slot("embedding", ())
        for root in ROOTS:
            for option in self.options(embedding, root):
                if weight_name(option[0].name, names):
                    return root
        return ROOTS[0]


def weight_name(name: str, names: Collection[str]) -> str | None:
    """What the checkpoint calls the tensor of a part, or None where it has none."""
    return next((found for found in (f"{name}.weight", name) if found in names), None)


def bias_name(name: str, names: Collection[str]) -> str | None:
    """What the checkpoint calls the bias of a part, or None where it has none."""
    return next((found for found in (f"{name}.bias", f"{name}_bias") if found in names), None)
