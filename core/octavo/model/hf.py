"""Any causal language model of transformers as a program: its layers, with our paged attention between them.

T tokens of a step, H hidden size, S requested rows, V vocabulary. The tokens of all sequences stand side by side in
one row of a batch, [1, T]; only attention knows whose they are. Everything else that a model does must be
token by token, which `hf_trial` tries before a model serves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from octavo.contract import AttentionBackend, KVCache, RowMode, Rows, StepBatch, StepOutput, Support
from octavo.contract.row_outputs import RowOutputs, num_chunk_rows, row_outputs
from octavo.errors import ModelError, UnsupportedError
from octavo.model.description import HfModel
from octavo.model.hf_attention import IMPLEMENTATION, PagedAttention, Step, register
from octavo.model.hf_describe import causal_class, hf_config, quiet
from octavo.model.hf_rope import settle_rope
from octavo.model.hf_trial import Trial
from octavo.model.kv_groups import KVGroup

__all__ = ["HfProgram", "load_hf"]


def load_hf(
    description: HfModel,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: bool,
    seed_dummy: int | None = None,
) -> torch.nn.Module:
    """The model with its weights, in `dtype` on `device`, its attention led to paged attention.

    Args:
        description: of the model.
        dtype: of the weights, but for those that the model keeps in float32.
        device: where they go.
        max_model_len: tokens of the longest request, for rope scalings that depend on it.
        progress: show a bar on stderr.
        seed_dummy: make random weights from this seed instead of reading any.

    Raises:
        ModelError: the checkpoint is missing, broken, or does not fit the config. One line.

    """
    register()
    folder = description.files.path
    config = hf_config(folder)
    cls = causal_class(config)
    with quiet(progress):
        if seed_dummy is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_dummy)
                model: torch.nn.Module = cls._from_config(config, attn_implementation=IMPLEMENTATION, dtype=dtype)
        else:
            model = _read(cls, config, description, dtype)
    model = model.to(device).eval().requires_grad_(False)
    settle_rope(model, max_model_len)
    return model


def _read(cls: Any, config: Any, description: HfModel, dtype: torch.dtype) -> torch.nn.Module:
    folder = description.files.path
    if not any(folder.glob("*.safetensors*")):
        raise ModelError(f"folder {folder} has no safetensors, the one format of weights that is read from folders")
    try:
        model, info = cls.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # to be told of them
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever foreign files make of a library
        text = " ".join(str(error).split())
        raise ModelError(f"{folder}: {cls.__name__} cannot be loaded ({type(error).__name__}: {text[:300]})") from error
    faults = [
        f"{what} {len(names)}: {', '.join(sorted(map(_name_of, names))[:3])}"
        for what, key in (
            ("missing", "missing_keys"),
            ("without a place in it", "unexpected_keys"),
            ("of another shape", "mismatched_keys"),
        )
        if (names := info.get(key))
    ]
    if faults:
        raise ModelError(f"{folder}: tensors that do not fit the {cls.__name__} of config.json: {'; '.join(faults)}")
    return model  # type: ignore[no-any-return]


def _name_of(key: str | tuple[str, torch.Size, torch.Size]) -> str:
    """A tensor's name, with the shapes found and expected where transformers tells them."""
    return key if isinstance(key, str) else f"{key[0]} is {list(key[1])}, expected is {list(key[2])}"


class HfProgram:
    """A `Program` of one of transformers' models."""

    def __init__(
        self,
        description: HfModel,
        model: torch.nn.Module,
        *,
        dtype: torch.dtype,
        device: torch.device,
        groups: Sequence[KVGroup],
        backends: Sequence[AttentionBackend],
    ) -> None:
        """Put paged attention into the model and part its head from its body.

        Args:
            description: of the model.
            model: from `load_hf`; the program owns it.
            dtype: of activations.
            device: of tensors.
            groups: the layers', from `group_layers`; `bind` gets a cache for each.
            backends: of the groups.

        Raises:
            UnsupportedError: the model does something that is not token by token; found by a trial.

        """
        self._description = description
        self._dtype = dtype
        self._device = device
        self._groups = tuple(groups)
        self._backends = tuple(backends)
        self._step = Step()
        self._caches: Sequence[KVCache] = ()
        for g, group in enumerate(groups):
            for i, number in enumerate(group.layers):
                layer = description.layers[number]
                place = PagedAttention(layer, backends[g], g, i, self._step)
                model.get_submodule(layer.module).octavo_attention = place  # type: ignore[assignment]
        with _named(description):
            trial = Trial(model, description.vocab_size, device)
        self._hidden_size: int = model.get_input_embeddings().weight.shape[-1]  # type: ignore[operator]
        body = model.get_submodule(description.body)
        self._body: Any = body.forward
        self._head = _Head(model, body)
        with _named(description):
            trial.check(self, backends, [group.spec for group in groups], dtype)
        self._caches = ()

    @property
    def row_invariant(self) -> Support:
        """No: the layers are transformers' own."""
        return Support.no("transformers' layers call torch's linear, which picks its tiling by the rows")

    @property
    def modes(self) -> frozenset[RowMode]:
        """All of them."""
        return frozenset(RowMode)

    def workspace_bytes(self, max_tokens: int, max_rows: int) -> int:
        """An estimate: six times the widest layer's output, the residual stream thrice, and rows of logits."""
        vocab_size = self._description.vocab_size
        tokens = max_tokens * (6 * self._description.width + 3 * self._hidden_size) * self._dtype.itemsize
        chunk_rows = min(max_rows, num_chunk_rows(vocab_size))
        return tokens + (max_rows + 3 * chunk_rows) * vocab_size * torch.float32.itemsize

    def bind(self, kv_caches: Sequence[KVCache]) -> None:
        """The caches, one a group in the groups' order."""
        if len(kv_caches) != len(self._backends):
            raise ValueError(f"{len(kv_caches)} KV caches for {len(self._backends)} groups")
        self._caches = tuple(kv_caches)

    def submit(self, batch: StepBatch, rows: Rows) -> "_Handle":
        """Run the step as far as the device does so on its own."""
        if batch.adapter_ids is not None or batch.hidden_in is not None:
            raise UnsupportedError("transformers' models run whole and without adapters")
        with torch.no_grad():
            return _Handle(self._run(batch, rows))

    def _run(self, batch: StepBatch, rows: Rows) -> RowOutputs:
        self._step.plans = [
            backend.plan(cache, attention)
            for backend, cache, attention in zip(self._backends, self._caches, batch.attention, strict=True)
        ]
        given = batch.input_embeds
        tokens = {"input_ids": batch.token_ids[None]} if given is None else {"inputs_embeds": given[None]}
        outputs = self._body(**tokens, position_ids=batch.positions[None], use_cache=False)
        self._step.plans = []
        if not len(rows.index):
            return RowOutputs()
        hidden = outputs.last_hidden_state[0]
        distinct, inverse = np.unique(rows.index, return_inverse=True)
        hidden = hidden[torch.from_numpy(distinct).to(hidden.device)]

        head = self._head.after(type(outputs))
        return row_outputs(hidden, inverse.reshape(-1), rows, head, self._description.vocab_size)


@contextmanager
def _named(description: HfModel) -> Iterator[None]:
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{description.files.path}: {description.class_name}: {error}") from error


class _Head:
    """What a model does with final hidden states, whatever that is (scales, caps, biases): its own forward, whose
    body answers at once with the hidden states that we give it.
    """

    def __init__(self, model: torch.nn.Module, body: torch.nn.Module) -> None:
        self._model = model
        self._answer: Any = None
        body.forward = lambda *args, **kwargs: self._answer

    def after(self, output_class: type) -> Callable[[torch.Tensor], torch.Tensor]:
        """From hidden states [n, H] to logits [n, V] float32; the body's outputs are of a class."""

        def logits(hidden: torch.Tensor) -> torch.Tensor:
            self._answer = output_class(last_hidden_state=hidden[None])
            found: torch.Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits
            return found[0].float()

        return logits


class _Handle:
    """A step under way: its outputs are fetched to the host when they are asked for."""

    def __init__(self, outputs: RowOutputs) -> None:
        self._outputs = outputs

    def result(self) -> StepOutput:
        """The outputs, in host memory."""
        return self._outputs.fetch()
