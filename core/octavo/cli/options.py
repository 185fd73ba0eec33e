"""Flags that sub-commands share: every setting of the engine, and how tokens are chosen."""

import argparse
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.config import EngineConfig, Setting, settings
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

__all__ = ["Formatter", "add_sampling", "add_settings", "sampling_changes", "sampling_params", "settings_of"]

Formatter = argparse.RawDescriptionHelpFormatter
ELSEWHERE = {"model"}  # settings that a sub-command takes in another way


def add_settings(parser: argparse.ArgumentParser, *, model_flag: bool = False) -> None:
    """Add MODEL and a flag for each setting. What is not given stays absent, so that file and environment count.

    `model_flag` makes the model a flag too, for a sub-command that can do without.
    """
    model_help = next(s.help for s in settings() if s.name == "model")
    if model_flag:
        parser.add_argument("--model", metavar="MODEL", default=argparse.SUPPRESS, help=model_help)
    else:
        parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the environment and flags win over it")
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help="the settings of speculation in one, as vLLM takes them: method, num_speculative_tokens, ...",
    )
    for name, group in itertools.groupby(settings(), lambda s: s.group):
        section = parser.add_argument_group(f"{name} settings")
        for setting in group:
            if setting.name not in ELSEWHERE:
                _add_setting(section, setting)


def settings_of(args: argparse.Namespace) -> EngineConfig:
    """The settings that file, environment and flags give, the later ones winning."""
    names = (*(s.name for s in settings()), "speculative_config")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return EngineConfig.load(args.config, **given)


def _add_setting(section: argparse._ArgumentGroup, setting: Setting) -> None:
    flags = [_flag(name) for name in setting.names]
    text = setting.help if setting.default is None else f"{setting.help} (default: {_shown(setting.default)})"
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if setting.base_type is bool:
        section.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
    elif setting.choices:
        section.add_argument(*flags, choices=setting.choices, **options)
    else:
        section.add_argument(*flags, type=_parser_of(setting), metavar=_metavar(setting.base_type), **options)


def _parser_of(setting: Setting) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return setting.parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(kind: type) -> str:
    return {int: "N", float: "X"}.get(kind, "NAME")


def _shown(default: Any) -> str:
    return {True: "on", False: "off"}[default] if isinstance(default, bool) else str(default)


@dataclass(frozen=True)
class _SamplingFlag:
    name: str
    kind: type
    help: str


SAMPLING_FLAGS = (
    _SamplingFlag("temperature", float, "0 takes the most likely token each time"),
    _SamplingFlag("top_k", int, "choose among the N most likely tokens; 0: all"),
    _SamplingFlag("top_p", float, "choose among the most likely tokens that reach this probability together"),
    _SamplingFlag("min_p", float, "leave out tokens less likely than this share of the most likely one"),
    _SamplingFlag("repetition_penalty", float, "over 1 discourages tokens of prompt and output"),
    _SamplingFlag("presence_penalty", float, "discourages tokens of the output"),
    _SamplingFlag("frequency_penalty", float, "the same, for each time that they stand there"),
    _SamplingFlag("min_tokens", int, "tokens before the output may end"),
)


def add_sampling(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Add the flags of how tokens are chosen; `max_tokens` is the sub-command's own default."""
    section = parser.add_argument_group(
        "how tokens are chosen",
        "What is not given is what the model's files recommend, and greedy where they are silent.",
    )
    limit = "as many as max_model_len leaves" if max_tokens is None else str(max_tokens)
    section.add_argument(
        "--max-tokens", type=int, metavar="N", default=max_tokens, help=f"tokens to generate at most (default: {limit})"
    )
    for flag in SAMPLING_FLAGS:
        section.add_argument(
            _flag(flag.name), type=flag.kind, metavar=_metavar(flag.kind), default=argparse.SUPPRESS, help=flag.help
        )
    section.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=argparse.SUPPRESS,
        help="text that ends the output; repeatable",
    )
    section.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on past the model's end-of-sequence token",
    )


def sampling_changes(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given as flags, checked on their own.

    Raises:
        RequestError: a value is out of range; said before a model is loaded.

    """
    names = ("max_tokens", *(flag.name for flag in SAMPLING_FLAGS), "stop", "ignore_eos", "n")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    SamplingParams(**given)
    return given


def sampling_params(recommended: Mapping[str, Any], changes: Mapping[str, Any]) -> SamplingParams:
    """What was given, else what the model's files recommend, else greedy.

    Raises:
        RequestError: the whole contradicts itself.

    """
    return SamplingParams(**{"temperature": 0.0, **recommended, **changes})
