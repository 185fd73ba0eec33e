"""Calibration as a worker does it: on its own device, by the model's own tokenizer, once for a model and a text."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from octavo.config import EngineConfig
from octavo.contract import Platform
from octavo.errors import ConfigError
from octavo.hardware.resolve import OpResolver
from octavo.model.calibration import Calibration, calibration_text, cut
from octavo.model.checkpoint import Checkpoint
from octavo.model.describe import Calibrate
from octavo.model.description import NativeModel
from octavo.model.input_squares import input_squares
from octavo.model.weights import Filling
from octavo.text.tokenizer import load_tokenizer

__all__ = ["calibrator"]

logger = logging.getLogger(__name__)


def calibrator(
    config: EngineConfig,
    description: NativeModel,
    platform: Platform,
    resolver: OpResolver,
    dtype: torch.dtype,
    *,
    progress: bool,
) -> Calibrate:
    """What `load_weights` asks for the importance of columns.

    It raises ConfigError where the user's text cannot serve. Where the model cannot be run over a text it says why in
    the log and knows nothing, so that all columns count alike.
    """
    settings = config.model
    assert settings.max_model_len is not None and config.cache.block_size is not None, "settled"
    max_model_len, block_size = settings.max_model_len, config.cache.block_size
    own = description.files.tokenizer if settings.tokenizer is None else Path(settings.tokenizer)

    def calibrate(plan: Sequence[Filling], checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
        text = calibration_text(settings.calibration_file)

        def find() -> dict[str, torch.Tensor]:
            ids = [token_id for token_id in load_tokenizer(own).encode(text) if token_id < description.vocab_size]
            found = input_squares(
                description,
                plan,
                checkpoint,
                cut(ids, settings.calibration_file, max_model_len),
                dtype=dtype,
                device=platform.device,
                resolver=resolver.unused(),
                block_size=block_size,
                progress=progress,
            )
            overflown = [slot for slot, squares in found.items() if not squares.isfinite().all()]
            if overflown:
                logger.warning("inputs of %s overflow %s: its columns count alike", ", ".join(overflown), dtype)
            return {slot: squares for slot, squares in found.items() if slot not in overflown}

        try:
            return Calibration((description.files.path, own), text, dtype, max_model_len).squares(find)
        except ConfigError:
            raise
        except Exception as error:  # of a tokenizer, or of an op
            reason = " ".join(str(error).split()) or type(error).__name__
            logger.warning("weights become int4 without calibration, which costs quality: %s", reason)
            return {}

    return calibrate
