"""What each attention layer of a transformers model asks for, found by a forward that computes nothing.

The model is made on torch's meta device, where tensors have shapes and no content, so it costs no memory and no
weights. Its layers' calls of attention are caught, and the masks that it would have used are asked whom they let
a query see, at positions around every edge that there may be: what paged attention will do must be the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from octavo.contract import Attention
from octavo.errors import UnsupportedError
from octavo.model.description import HfLayer
from octavo.model.hf_attention import PROBED, register, wanted

__all__ = ["Probed", "probe"]

NUM_TOKENS = 8


@dataclass(frozen=True)
class Probed:
    """What a model does.

    Attributes:
        layers: its attention layers in the order in which they run.
        body: name of the module that gives final hidden states.
        vocab_size: logits of a token.
        width: numbers a token that its widest product yields, the head's aside.
        num_parameters: of the whole model.

    """

    layers: tuple[HfLayer, ...]
    body: str
    vocab_size: int
    width: int
    num_parameters: int


def probe(make: Callable[[str], torch.nn.Module], num_layers: int, max_model_len: int) -> Probed:
    """Run a model on nothing.

    Args:
        make: the model, from the name of an attention implementation; called on the meta device.
        num_layers: that its config speaks of.
        max_model_len: positions that masks are asked about.

    Raises:
        UnsupportedError: the model asks for something that paged attention does not do, or keeps state elsewhere.

    """
    register(_make_mask)
    calls: list[_Call] = []
    answers: dict[str, Any] = {}
    try:
        with torch.device("meta"), torch.no_grad():
            model = make(PROBED).eval()
            for name, module in model.named_modules():
                module.octavo_attention = _Recorder(name, calls)
                module.register_forward_pre_hook(partial(_note_call, name, answers))
                module.register_forward_hook(partial(_note_answer, name, answers))
            tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64)
            positions = torch.arange(NUM_TOKENS)[None]
            nothing_hidden = torch.ones_like(tokens)  # without it transformers looks into the positions for rows
            logits = model(tokens, attention_mask=nothing_hidden, position_ids=positions, use_cache=False).logits
    except Exception as error:
        text = str(error).partition("\n")[0][:200]
        raise UnsupportedError(f"its forward cannot be foreseen ({type(error).__name__}: {text})") from error
    if not calls:
        raise UnsupportedError("its layers do not call attention through transformers' attention interface")
    if len(calls) != num_layers:
        raise UnsupportedError(
            f"{len(calls)} calls of attention in {num_layers} layers; the others keep state of a kind that is not "
            "paged, or share keys and values"
        )
    twice = {call.module for call in calls if sum(other.module == call.module for other in calls) > 1}
    if twice:
        raise UnsupportedError(f"{min(twice)} attends more than once in a step")
    body = list(answers)[1]  # what the whole model calls first
    if getattr(answers[body], "last_hidden_state", None) is None:
        raise UnsupportedError(f"{body or 'its forward'} gives no final hidden states")
    layers = tuple(call.layer(max_model_len) for call in calls)
    parameters = list(model.parameters())
    vocabularies = {logits.shape[-1], *(len(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding))}
    width = max(_width(p) for p in parameters if not (p.ndim == 2 and len(p) in vocabularies))
    return Probed(layers, body, logits.shape[-1], width, sum(p.numel() for p in parameters))


def _note_call(name: str, answers: dict[str, Any], *_: Any) -> None:
    answers.setdefault(name, None)


def _note_answer(name: str, answers: dict[str, Any], _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
    answers[name] = output


@dataclass(frozen=True)
class _Call:
    """One call of attention."""

    module: str
    attention: Attention
    query_size: int
    value_size: int
    num_tokens: tuple[int, int]  # of queries and of keys
    unknown: list[str]
    is_causal: bool
    mask: Any

    def layer(self, max_model_len: int) -> HfLayer:
        """The layer, once everything about the call is understood.

        Raises:
            UnsupportedError: it is not.

        """
        if self.unknown:
            raise UnsupportedError(f"{self.module} gives attention {', '.join(self.unknown)}")
        if self.num_tokens != (NUM_TOKENS, NUM_TOKENS):
            raise UnsupportedError(f"{self.module} attends {self.num_tokens[0]} tokens to {self.num_tokens[1]} others")
        if not self.is_causal:
            raise UnsupportedError(f"{self.module} lets tokens see those after them")
        if self.attention.num_heads % self.attention.num_kv_heads:
            raise UnsupportedError(f"{self.module} has heads that its keys and values do not divide")
        if self.mask is not None:
            asked: _Mask | None = getattr(self.mask, "octavo_mask", None)
            if asked is None:
                raise UnsupportedError(f"{self.module} makes its own mask of attention")
            try:
                is_causal = asked.is_causal(self.attention.window, max_model_len)
            except Exception as error:  # it reads tensors that have no content here
                raise UnsupportedError(f"{self.module} has a mask that depends on more than positions") from error
            if not is_causal:
                window = self.attention.window
                shape = "no window" if window is None else f"a window of {window}"
                raise UnsupportedError(f"{self.module} has a mask that is not causal with {shape}")
        return HfLayer(self.module, self.attention, self.query_size, self.value_size)


@dataclass(frozen=True)
class _Recorder:
    """Stands for attention in one module."""

    module: str
    calls: list[_Call]

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        attention, unknown = wanted(query, key, value, kwargs)
        causal = kwargs.get("is_causal")
        self.calls.append(
            _Call(
                self.module,
                attention,
                query.shape[-1],
                value.shape[-1],
                (query.shape[2], key.shape[2]),
                unknown,
                causal is None or bool(causal),
                attention_mask,
            )
        )
        return query.new_empty((1, query.shape[2], query.shape[1], value.shape[-1]))


@dataclass
class _Mask:
    """A mask as a model wants it: from (batch, head, query, key position) to whether the query sees the key."""

    sees: Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
    known: dict[tuple[int | None, int], bool] = field(default_factory=dict)

    def is_causal(self, window: int | None, max_model_len: int) -> bool:
        """Whether a token sees itself and those before it, within the window where there is one."""
        key = (window, max_model_len)
        if key not in self.known:
            self.known[key] = self._compare(window, _edges(window, max_model_len))
        return self.known[key]

    def _compare(self, window: int | None, positions: list[int]) -> bool:
        for query in positions:
            for kv in positions:
                sees = self.sees(0, 0, torch.tensor(query), torch.tensor(kv))
                if bool(sees) != (kv <= query and (window is None or query - kv < window)):
                    return False
        return True


def _edges(window: int | None, max_model_len: int) -> list[int]:
    """Positions around which masks of all kinds change: powers of two, multiples of the window."""
    at = {0, max_model_len - 1, *(1 << n for n in range(max_model_len.bit_length()))}
    if window is not None:
        at |= {window, 2 * window, 3 * window}
    near = {position + offset for position in at for offset in (-1, 0, 1)}
    return sorted(position for position in near if 0 <= position < max_model_len)


def _make_mask(*, mask_function: Callable[..., torch.Tensor], q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """What transformers calls for the mask of `PROBED`: a tensor that remembers the function it was to be made by."""
    mask = torch.zeros((1, 1, q_length, kv_length), dtype=torch.bool)
    mask.octavo_mask = _Mask(mask_function)  # type: ignore[attr-defined]
    return mask


def _width(parameter: torch.Tensor) -> int:
    return max(parameter.shape[-2:]) if parameter.ndim > 1 else 0
