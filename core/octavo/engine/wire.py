"""Messages between the front and the engine process, as MessagePack over one pair of sockets."""

from typing import Any, TypeAlias

import msgspec

from octavo.engine.profiling import Profile, Profiled
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.scheduler.messages import RequestUpdate

__all__ = [
    "Abort",
    "AddRequest",
    "Failed",
    "FinishSample",
    "FromEngine",
    "Gained",
    "Ready",
    "Refused",
    "ResetPrefixCache",
    "Start",
    "Stop",
    "ToEngine",
    "WireStats",
    "decode_from_engine",
    "decode_to_engine",
    "encode",
]


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: the settings, flat, and where the board is."""

    settings: dict[str, Any]
    board: str
    max_requests: int


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """A new request, or one to go on with after the engine before this one died.

    Attributes:
        request_id: its name.
        number: the front's number for it, for the board.
        token_ids: the prompt.
        params: with seed and ids of bad words.
        eos_token_ids: the model's ends.
        priority: lower first.
        salt: keeps its prefix cache apart.
        pooling: of an embedding, or None.
        outputs: what each sample has already generated.
        finished: samples that have ended.
        num_prompt_logprobs: prompt positions already scored.
        runs_alone: it was in the step in which the engine died.
        tenant: who sent it, and for which of their users.
        num_prompt_done: prompt tokens already counted as computed or cached.

    """

    request_id: str
    number: int
    token_ids: list[int]
    params: SamplingParams
    eos_token_ids: list[int]
    priority: int = 0
    salt: bytes = b""
    pooling: PoolingParams | None = None
    outputs: dict[int, list[int]] = {}
    finished: list[int] = []
    num_prompt_logprobs: int = 0
    runs_alone: bool = False
    tenant: tuple[str, str] = ("", "")
    num_prompt_done: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End requests that nobody waits for."""

    request_ids: list[str]


class FinishSample(msgspec.Struct, frozen=True, tag=True):
    """End a sample that a stop string ended."""

    request_id: str
    index: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Forget cached prefixes."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process."""


class WireStats(msgspec.Struct, frozen=True):
    """The engine at a glance, sent with every step."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_shared_blocks: int = 0
    counts: dict[str, int] = {}
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded: the settled settings, and lines that say what is served on what."""

    settings: dict[str, Any]
    facts: dict[str, str]
    memory: list[tuple[str, str]]
    stats: WireStats


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start, for a reason that a user can mend."""

    kind: str
    message: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request could never be served."""

    request_id: str
    message: str
    param: str | None


class Gained(msgspec.Struct, frozen=True, tag=True):
    """What requests gained in a step."""

    updates: list[RequestUpdate]
    stats: WireStats


ToEngine: TypeAlias = Start | AddRequest | Abort | FinishSample | ResetPrefixCache | Profile | Stop
FromEngine: TypeAlias = Ready | Failed | Refused | Gained | Profiled

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message of the front."""
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    """A message of the engine."""
    return _from_engine.decode(data)
