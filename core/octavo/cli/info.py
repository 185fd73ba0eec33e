"""`octavo info`: what this machine offers, what serves, and why the rest does not."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.cli.options import Formatter, add_settings, settings_of
from octavo.errors import OctavoError

if TYPE_CHECKING:
    import torch

    from octavo.config import EngineConfig
    from octavo.contract import AttentionSpec, OpSignature, Platform, PlatformInfo, Support
    from octavo.hardware.registry import Registry
    from octavo.hardware.resolve import Manifest

__all__ = ["add_parser", "run"]

HANG_SECONDS = 4.0

T = TypeVar("T")

EXAMPLES = """\
examples:
  octavo info
  octavo info --model demo --max-num-seqs 8     memory and kernels for a model, with these settings
  octavo info --platform NAME --json            the same for another program to read

The exit code is 1 where a plugin is broken, or where no platform can serve.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "info",
        usage="octavo info [--model MODEL] [options]",
        description="Platforms, memory and which kernel serves each op, with reasons.",
        epilog=EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="X",
        default=HANG_SECONDS,
        help=f"seconds after which a plugin that does not answer is named and ends this command "
        f"(default: {HANG_SECONDS:g})",
    )
    add_settings(parser, model_flag=True)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 where a plugin is broken or nothing can serve."""
    config = settings_of(args)

    from octavo.cli.info_text import print_report

    report = gather(config, with_model=hasattr(args, "model"), timeout=args.timeout)
    if args.json:
        json.dump(report, sys.stdout, indent=2)
        print()
    else:
        print_report(report, tracebacks=args.debug)
    return 1 if report["problems"] or report["error"] else 0


def gather(config: "EngineConfig", *, with_model: bool, timeout: float = HANG_SECONDS) -> dict[str, Any]:
    """Everything that is printed, as plain data.

    Keys are always there: contract, plugins, platforms, problems, chosen, error, capabilities, diagnostics, memory,
    model, ops. What could not be found out is None, and `error` then says why.
    """
    from octavo.contract import API_VERSION
    from octavo.hardware.registry import discover

    registry = discover(timeout=timeout, exit_on_hang=True)
    report: dict[str, Any] = {
        "contract": ".".join(map(str, API_VERSION)),
        "plugins": [dict(vars(plugin)) for plugin in registry.plugins],
        "platforms": _platforms(registry),
        **dict.fromkeys(("problems", "chosen", "error", "capabilities", "diagnostics", "memory", "model", "ops")),
    }
    try:
        _fill(report, registry, config, with_model, timeout)
    except OctavoError as error:
        report["error"] = str(error)
    report["problems"] = [dict(vars(problem)) for problem in registry.problems]
    return report


def _platforms(registry: "Registry") -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "plugin": registry.plugin_of(info.name).name,
            "distribution": registry.plugin_of(info.name).distribution,
            "version": registry.plugin_of(info.name).version,
            "available": info.available,
            "reason": info.reason,
            "priority": info.priority,
            "devices": list(info.devices),
        }
        for info in registry.platforms.values()
    ]


def _fill(
    report: dict[str, Any], registry: "Registry", config: "EngineConfig", with_model: bool, timeout: float
) -> None:
    """What the chosen platform says of itself, or of a model on it, as far as it comes."""
    from octavo.hardware.choose import choose, create_platform, portable_ops

    name = config.platform.platform
    choice = choose(registry, name)
    report["chosen"] = {"name": choice.info.name, "reason": choice.reason}
    device = config.platform.device
    platform = _asked(registry, choice.info, "create", timeout, lambda: create_platform(choice.info, device))
    if config.platform.num_threads is not None:
        platform.set_num_threads(config.platform.num_threads)
    shared = portable_ops(registry, platform, name)
    memory = platform.memory_info()
    report["capabilities"] = _capabilities(platform)
    report["diagnostics"] = dict(platform.diagnostics())
    report["memory"] = {"free": memory.free, "total": memory.total}
    if with_model:
        report |= _with_model(registry, config, platform)
        return
    from octavo.hardware.resolve import OpResolver

    resolver = _asked(registry, choice.info, "its offers", timeout, lambda: OpResolver(platform, shared))
    _try_out(registry, choice.info, platform, timeout)
    resolver.resolve_attention(example_attention(platform))
    for signature in example_signatures(platform):
        resolver.resolve(signature)
    report["ops"] = _ops(resolver.manifest, resolver.manifest.row_invariant)


def _asked(registry: "Registry", info: "PlatformInfo", hook: str, timeout: float, ask: Callable[[], T]) -> T:
    """What a platform answers; where it fails, its plugin is named too."""
    from octavo.errors import PlatformError
    from octavo.hardware.watchdog import Watchdog

    plugin = registry.plugin_of(info.name)
    try:
        return Watchdog(timeout, exit_on_hang=True).call(f"plugin {plugin} in {hook}", ask)
    except PlatformError as error:
        _blame(registry, info, hook, str(error))
        raise


def _try_out(registry: "Registry", info: "PlatformInfo", platform: "Platform", timeout: float) -> None:
    """Whoever says yes to a small case and fails on it is a broken plugin's."""
    from octavo.testing.trial import lies_of_attention, lies_of_ops

    def try_ops() -> list[str]:
        return list(lies_of_ops(platform, platform.ops()))

    def try_attention() -> list[str]:
        return list(lies_of_attention(platform, platform.attention_backends()))

    for hook, attempt in (("ops", try_ops), ("attention_backends", try_attention)):
        for lie in _asked(registry, info, hook, timeout, attempt):
            _blame(registry, info, hook, lie)


def _blame(registry: "Registry", info: "PlatformInfo", hook: str, reason: str) -> None:
    from octavo.hardware.registry import Problem

    plugin = registry.plugin_of(info.name)
    origin = f"{plugin.distribution} {plugin.version}"
    registry.problems.append(Problem(plugin.name, origin, hook, " ".join(reason.split())))


def _with_model(registry: "Registry", config: "EngineConfig", platform: "Platform") -> dict[str, Any]:
    """What a model takes and who serves it: it is loaded for that, and let go."""
    from octavo.engine.settle import settle
    from octavo.engine.terminal import progress_wanted
    from octavo.executor.local import LocalExecutor
    from octavo.model.describe import describe_model
    from octavo.model.encoder import EncoderModel
    from octavo.model.files import resolve_model

    files = resolve_model(config.model.model, progress=progress_wanted())
    description = describe_model(files, config.model.max_model_len, config.model.model_impl)
    settled = settle(config, description, platform)
    if isinstance(description, EncoderModel):
        program = f"transformers' {description.class_name}, whole prompts at once, for embeddings alone"
        model = f"{description.files.name} ({description.architecture})"
        return {"model": {"model": model, "program": program, "settings": settled.flat()}}
    executor = LocalExecutor(settled, description, platform, registry)
    try:
        plan = executor.memory_plan
        derived = {name: getattr(plan, name) for name in ("kv_bytes", "host_bytes", "reserved", "left", "max_tokens")}
        return {
            "memory": {**vars(plan), **derived},
            "model": {**executor.facts(), "settings": settled.flat()},
            "ops": _ops(executor.manifest, executor.row_invariant),
        }
    finally:
        executor.shutdown()


def _capabilities(platform: "Platform") -> dict[str, Any]:
    """Names and plain values of what the platform can do."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return value if value is None or isinstance(value, bool | int) else str(value).removeprefix("torch.")

    return {name: plain(value) for name, value in vars(platform.capabilities()).items()}


def example_signatures(platform: "Platform") -> "list[OpSignature]":
    """Each op at a common size, in the platform's preferred dtype: what serves where no model says more."""
    from octavo.contract import OPS

    sizes: dict[str, int | float | bool | str] = {
        "hidden_size": 4096,
        "head_size": 128,
        "rotary_dim": 128,
        "interleaved": False,
        "activation": "silu",
        "width": 14336,
        "weight_format": "dense",
        "in_features": 4096,
        "out_features": 4096,
        "vocab_size": 131072,
    }
    dtype = _preferred_dtype(platform)
    return [op.signature(dtype, platform.device.type, sizes) for op in OPS.values()]


def example_attention(platform: "Platform") -> "AttentionSpec":
    """Grouped heads at a common size, on the platform's preferred blocks."""
    from octavo.contract import AttentionSpec

    can = platform.capabilities()
    return AttentionSpec(
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        value_size=128,
        block_size=can.block_sizes[0] if can.block_sizes else 16,
        dtype=_preferred_dtype(platform),
        kv_dtype=can.kv_cache_dtypes[0] if can.kv_cache_dtypes else _preferred_dtype(platform),
        scale=128**-0.5,
    )


def _preferred_dtype(platform: "Platform") -> "torch.dtype":
    import torch

    can = platform.capabilities()
    return can.dtypes[0] if can.dtypes else torch.float32


def _ops(manifest: "Manifest", row_invariant: "Support") -> dict[str, Any]:
    return {
        "hash": manifest.hash,
        "row_invariant": _answer(row_invariant),
        "rows": [
            {
                "call": row.call,
                "provider": row.provider,
                "tier": row.tier,
                "version": row.version,
                "row_invariant": _answer(row.row_invariant),
                "graph_safe": row.graph_safe,
                "skipped": [
                    {"provider": skipped.provider, "tier": skipped.tier, "reasons": list(skipped.reasons)}
                    for skipped in row.skipped
                ],
            }
            for row in manifest.rows
        ],
    }


def _answer(support: "Support") -> dict[str, Any]:
    return {"ok": support.ok, "reasons": list(support.reasons)}
