"""Calibration: the text by which weights of 4 bits are fitted, and what was found by it, kept for the next start.

One file a model and text, `calibration/HASH.safetensors` in the cache folder. The hash is of the paths, sizes and
times of the model's files, of the text, of the length of its pieces and of the dtype; a file that cannot be read is
made anew.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from octavo.errors import ConfigError, OctavoError
from octavo.model.files import cache_folder

__all__ = ["NUM_PIECES", "PIECE_LEN", "Calibration", "calibration_text", "cut"]

NUM_PIECES, PIECE_LEN = 8, 512  # sequences at most, and tokens of each
MIN_TOKENS = 512
MAX_BYTES = 16 << 20  # of a text, all of which is cut into tokens: ten seconds and 2 GB
FORMAT = b"1"  # of what is kept

logger = logging.getLogger(__name__)

Squares = Mapping[str, torch.Tensor]


def calibration_text(file: str | None) -> str:
    """The user's text, or the one that ships with Octavo.

    Raises:
        ConfigError: it cannot be read, is empty, or is over MAX_BYTES.

    """
    if file is None:
        return files("octavo.model").joinpath("calibration.txt").read_text(encoding="utf-8")
    try:
        with Path(file).expanduser().open("rb") as source:
            given = source.read(MAX_BYTES + 1)
        text = given.decode("utf-8").replace("\r\n", "\n") if len(given) <= MAX_BYTES else ""
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read calibration_file {file} ({reason}); name a text in UTF-8, or unset it for Octavo's own"
        ) from error
    if len(given) > MAX_BYTES:
        raise ConfigError(
            f"calibration_file {file} is over {MAX_BYTES >> 20} MiB, of which {NUM_PIECES * PIECE_LEN} tokens would be "
            "taken; name a part of it"
        )
    if not text.strip():
        raise ConfigError(f"calibration_file {file} is empty; name a text of at least {MIN_TOKENS} tokens, or unset it")
    return text


def cut(token_ids: Sequence[int], file: str | None, max_model_len: int) -> list[list[int]]:
    """Pieces of one length, at even distances.

    Raises:
        ConfigError: the text is too short.

    """
    if len(token_ids) < MIN_TOKENS and file is not None:
        raise ConfigError(
            f"calibration_file {file} has {len(token_ids)} tokens of this model, at least {MIN_TOKENS} are needed; "
            "name a longer text, or unset it for Octavo's own"
        )
    length = min(PIECE_LEN, max_model_len, len(token_ids))
    number = min(NUM_PIECES * PIECE_LEN // length, len(token_ids) // length)
    spare = len(token_ids) - length
    starts = [i * spare // max(number - 1, 1) for i in range(number)]
    return [list(token_ids[start : start + length]) for start in starts]


class Calibration:
    """What was found on a model by a text; made at need, kept in the cache folder."""

    def __init__(self, paths: Iterable[Path], text: str, dtype: torch.dtype, max_model_len: int = PIECE_LEN) -> None:
        """For a model.

        Args:
            paths: its files, and folders whose files are its.
            text: by which it is calibrated.
            dtype: in which.
            max_model_len: tokens that a piece of the text has at most, where it is below PIECE_LEN.

        """
        digest = hashlib.sha256(FORMAT)
        for path in paths:
            for file in sorted(path.glob("*")) if path.is_dir() else [path]:
                if file.is_file():
                    status = file.stat()
                    digest.update(f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        digest.update(f"{dtype}\0{min(PIECE_LEN, max_model_len)}\0{text}".encode())
        self._name = f"{digest.hexdigest()[:32]}.safetensors"

    def squares(self, find: Callable[[], Squares]) -> Squares:
        """What the cache has, else what `find` finds, which is kept then."""
        try:
            path = cache_folder() / "calibration" / self._name
        except OctavoError as error:
            logger.warning("calibration is not kept for the next start: %s", error)
            return find()
        kept = _read(path)
        if kept is not None:
            logger.info("calibrated before: %s", path)
            return kept
        found = find()
        try:
            _write(path, found)
        except OSError as error:
            logger.warning("calibration is not kept for the next start: cannot write %s (%s)", path, error.strerror)
        return found


def _read(path: Path) -> Squares | None:
    """None where there is no such file, or no sound one."""
    try:
        stored = load(path.read_bytes())
        if not all(_sound(found) for found in stored.values()):
            raise ValueError("numbers that no calibration gives")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is broken (%s) and is made anew", path, error)
        return None
    return stored


def _sound(found: torch.Tensor) -> bool:
    return found.dtype == torch.float32 and found.ndim == 1 and bool((found.isfinite() & (found >= 0)).all())


def _write(path: Path, found: Squares) -> None:
    """All of it or nothing: several processes may start at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(save({name: one.contiguous() for name, one in found.items()}))
        Path(scratch).replace(path)
    except BaseException:
        Path(scratch).unlink(missing_ok=True)
        raise
