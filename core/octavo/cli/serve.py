"""`octavo serve`: a model over HTTP, as OpenAI's clients expect it."""

import argparse
import asyncio
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.options import Formatter, add_settings, settings_of
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.server.options import ServerOptions

__all__ = ["add_parser", "run"]

KEYS_VARIABLE = "OCTAVO_API_KEYS"
LOG_LEVELS = ("debug", "info", "warning", "error")

EXAMPLES = """\
examples:
  octavo serve demo
  octavo serve ./Qwen2.5-0.5B-Instruct --host 0.0.0.0 --api-key-file keys.txt
  octavo serve model.gguf --served-model-name my-model --port 9000

Then, with any client of OpenAI's interface, at http://127.0.0.1:8000/v1:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 16}'

API keys also come from the environment: OCTAVO_API_KEYS="first second".
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "serve",
        usage="octavo serve MODEL [options]",
        description="Serve a model over HTTP. SIGTERM or Ctrl-C lets requests under way finish, then ends.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    _add_server_flags(parser.add_argument_group("server settings"))
    add_settings(parser)


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", metavar="NAME", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", metavar="N", type=int, default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument("--uds", metavar="FILE", help="listen on a unix socket, in place of host and port")
    group.add_argument("--tls-certificate", metavar="FILE", help="serve HTTPS with this certificate chain (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="its private key (PEM)")
    group.add_argument(
        "--api-key", metavar="KEY", action="append", default=[], help="only for who sends this key; repeatable"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the same, a key a line")
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        default=[],
        help="what clients call the model; repeatable (default: MODEL)",
    )
    group.add_argument(
        "--allowed-origin",
        metavar="URL",
        action="append",
        default=[],
        help="web pages from there may call from a browser; repeatable, * is all",
    )
    group.add_argument(
        "--max-body-bytes", metavar="N", type=int, default=32 << 20, help="longest request (default: 32 MiB)"
    )
    group.add_argument(
        "--max-waiting-requests",
        metavar="N",
        type=int,
        default=4096,
        help="more that wait are answered with 503 and when to come again (default: 4096)",
    )
    group.add_argument(
        "--max-waiting-tokens",
        metavar="N",
        type=int,
        default=4 << 20,
        help="the same, by the tokens of their prompts (default: 4194304)",
    )
    group.add_argument(
        "--metrics-compat",
        choices=("vllm", "none"),
        default="vllm",
        help="show metrics under these names beside our own (default: vllm)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a span of each request there, by OTLP over HTTP (default: as the OTEL_* variables say)",
    )
    group.add_argument(
        "--trust-request-chat-template", action="store_true", help="let requests bring a chat template of their own"
    )
    group.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="how the model writes tool calls: hermes, llama3, mistral, none (default: as its chat template shows)",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="how it marks its reasoning: think, deepseek_r1, none (default: as its chat template shows)",
    )
    group.add_argument(
        "--stall-timeout",
        metavar="X",
        type=float,
        default=60.0,
        help="seconds without a sign of life after which the engine is started anew (default: 60)",
    )
    group.add_argument(
        "--drain-seconds",
        metavar="X",
        type=float,
        default=30.0,
        help="how long requests under way may take to finish when the server is told to end (default: 30)",
    )
    group.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="what is logged (default: info)")


def run(args: argparse.Namespace) -> int:
    """Serve until told to end; an engine that is gone for good is an error."""
    config = settings_of(args)
    options = _options(args)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s server %(levelname)s %(name)s: %(message)s")
    os.environ["OCTAVO_LOG_LEVEL"] = args.log_level  # for the engine's process

    from octavo.server.run import Address, serve

    address = Address(args.host, args.port, args.uds, args.tls_certificate, args.tls_key)
    serving = serve(config, options, address, stall_timeout=args.stall_timeout, drain_seconds=args.drain_seconds)
    asyncio.run(serving)
    return 0


def _options(args: argparse.Namespace) -> "ServerOptions":
    from octavo.server.options import ServerOptions
    from octavo.server.tracing import check_installed, endpoint_of

    endpoint = endpoint_of(args.otlp_traces_endpoint, os.environ)
    if endpoint is not None:
        check_installed()
    if bool(args.tls_certificate) != bool(args.tls_key):
        raise ConfigError("--tls-certificate and --tls-key go together: give both or neither")
    for name, least in (
        ("max_body_bytes", 1),
        ("max_waiting_requests", 1),
        ("max_waiting_tokens", 1),
        ("stall_timeout", 0.1),
        ("drain_seconds", 0),
    ):
        if not getattr(args, name) >= least:  # NaN is neither
            raise ConfigError(f"{name} must be at least {least}, got {getattr(args, name)}")
    return ServerOptions(
        served_model_names=tuple(args.served_model_name),
        api_keys=_api_keys(args),
        max_body_bytes=args.max_body_bytes,
        allowed_origins=tuple(args.allowed_origin),
        trust_request_chat_template=args.trust_request_chat_template,
        tool_parser=args.tool_parser,
        reasoning_parser=args.reasoning_parser,
        max_waiting_requests=args.max_waiting_requests,
        max_waiting_tokens=args.max_waiting_tokens,
        with_vllm_metrics=args.metrics_compat == "vllm",
        otlp_traces_endpoint=endpoint,
    )


def _api_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """The keys of flags, of the file and of the environment. A file without one is an error, not an open door."""
    keys = list(args.api_key)
    if args.api_key_file is not None:
        try:
            text = Path(args.api_key_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys in {args.api_key_file}: {error}") from error
        found = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if not found:
            raise ConfigError(f"{args.api_key_file} holds no API key; give one a line")
        keys += found
    keys += [key for key in re.split(r"[\s,]+", os.environ.get(KEYS_VARIABLE, "")) if key]
    if not all(keys):
        raise ConfigError("an API key is empty; give at least one character")
    return tuple(dict.fromkeys(keys))
