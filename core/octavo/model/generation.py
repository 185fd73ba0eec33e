"""Which tokens begin and end a sequence, and how the model's makers would sample."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.model.checkpoint import read_json

__all__ = ["Generation", "read_generation", "token_ids"]

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Generation:
    """See the fields of the same names of `ModelDescription`."""

    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    sampling_defaults: Mapping[str, Any]


def read_generation(folder: Path, *configs: Mapping[str, Any]) -> Generation:
    """What a folder's generation_config.json says; of tokens on which it is silent, the first config that does not.

    Raises:
        ModelError: the file is broken, or token ids are none.

    """
    path = folder / "generation_config.json"
    own = read_json(path) if path.is_file() else {}

    def found(key: str) -> Any:
        return next((values[key] for values in (own, *configs) if key in values), None)

    return Generation(
        eos_token_ids=token_ids(found("eos_token_id"), folder),
        bos_token_id=next(iter(token_ids(found("bos_token_id"), folder)), None),
        sampling_defaults={key: own[key] for key in SAMPLING_KEYS if own.get(key) is not None},
    )


def token_ids(value: Any, where: Path) -> frozenset[int]:
    """One token id, several, or none, as configs write them.

    Raises:
        ModelError: something else.

    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{where}: token ids must be integers, they are {json.dumps(value)[:100]}")
    return frozenset(ids)
