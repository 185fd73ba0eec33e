"""Checks of what a platform says: of itself, of what it serves, and of what it does not offer."""

from types import MappingProxyType

import numpy as np
import torch

from octavo.config import settings as engine_settings
from octavo.contract import API_VERSION, OPS, Capabilities, MemoryInfo, OpSignature, Probe, Support
from octavo.executor.philox import philox4x32
from octavo.hardware.choose import create_platform
from octavo.testing.bench import Bench
from octavo.testing.cases_attention import SPECS
from octavo.testing.cases_ops import CASES
from octavo.testing.kernels import ask
from octavo.testing.outcome import NotOfferedError, require

__all__ = ["answers", "attributes", "facts", "graphs", "memory", "philox", "probe", "ranks", "settings"]

CONTRACT = ".".join(map(str, API_VERSION))

# Random123's kat_vectors: counter, key, answer.
ONES = 0xFFFFFFFF
KNOWN_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)
ODD_TRAITS: dict[str, int | float | bool | str] = {
    "weight_format": "no_such_format",
    "activation": "no_such_activation",
    "interleaved": True,
}
PROBED_BYTES = 16 << 20
ODD_DTYPES = (torch.float64, torch.int8, torch.complex64)


def facts(bench: Bench) -> str:
    """Capabilities, diagnostics and device."""
    platform, can = bench.platform, bench.capabilities
    require(isinstance(can, Capabilities), f"capabilities() returns {type(can).__name__}")
    require(platform.capabilities() == can, "capabilities() gives other facts the second time")
    for name in ("dtypes", "kv_cache_dtypes"):
        given = getattr(can, name)
        good = isinstance(given, tuple) and all(isinstance(dtype, torch.dtype) for dtype in given)
        require(good, f"{name} must be a tuple of torch dtypes, got {given!r}")
    for name in ("block_sizes", "head_sizes"):
        given = getattr(can, name)
        good = isinstance(given, tuple) and all(type(size) is int and size > 0 for size in given)
        require(good, f"{name} must be a tuple of sizes, got {given!r}")
    require(platform.name == bench.info.name, f"the plugin calls it {bench.info.name!r}, and it {platform.name!r}")
    require(isinstance(platform.device, torch.device), f"device is {platform.device!r}, a torch.device is right")
    told = platform.diagnostics()
    good = all(isinstance(key, str) and isinstance(line, str) and "\n" not in line for key, line in told.items())
    require(good, f"diagnostics() must map names to one line each, got {dict(told)!r}")
    twin = create_platform(bench.info, bench.device_index)
    require(twin.device == platform.device, f"made twice, the platform is on {platform.device} and {twin.device}")
    platform.synchronize()
    return f"on {platform.device}"


def memory(bench: Bench) -> str:
    """Copies in every dtype; free and total."""
    told = bench.platform.memory_info()
    require(isinstance(told, MemoryInfo), f"memory_info() returns {type(told).__name__}")
    good = type(told.free) is int and type(told.total) is int and 0 <= told.free <= told.total
    require(good, f"memory_info() says {told}; bytes, 0 <= free <= total, are right")
    host = torch.arange(-60, 60).view(8, 15)
    for dtype in (*bench.capabilities.dtypes, torch.int64, torch.int32, torch.bool):
        there = host.to(dtype).to(bench.device)
        same = torch.equal(there.cpu(), host.to(dtype)) and torch.equal(there[1:5, 2:].cpu(), host[1:5, 2:].to(dtype))
        require(same, f"{dtype} numbers come back from the device as others")
    return f"{told.free} of {told.total} bytes free"


def settings(bench: Bench) -> str:
    """What `config_defaults` returns."""
    known = {setting.name for setting in engine_settings()}
    view = MappingProxyType({"max_num_seqs": 4, "dtype": "float32"})
    preferred = bench.platform.config_defaults(view)
    unknown = sorted(set(preferred) - known)
    require(not unknown, f"config_defaults() names settings that there are not: {', '.join(unknown)}")
    return ", ".join(f"{name} {value}" for name, value in preferred.items()) or "no preference"


def attributes(bench: Bench) -> str:
    """Nobody can take a platform for another by asking for what it lacks."""
    require(not hasattr(bench.platform, "is_some_other_vendor"), "every attribute is there, whatever its name")
    return ""


def answers(bench: Bench) -> str:
    """Odd signatures and geometries too."""
    num_asked = 0
    for impl in bench.all_ops:
        if impl.op not in OPS:
            continue
        odd = [
            OpSignature(
                impl.op, dtype, bench.device.type, tuple((t, ODD_TRAITS.get(t, 12345)) for t in OPS[impl.op].traits)
            )
            for dtype in (*bench.capabilities.dtypes, *ODD_DTYPES)
        ]
        odd += [
            OpSignature(impl.op, bench.dtype, "no_such_device", case.signature(bench.dtype, "").traits)
            for case in CASES
            if case.op == impl.op
        ]
        for signature in odd:
            ask(impl.supports, signature, f"{impl.provider} ({impl.tier})")
            num_asked += 1
    for backend in bench.backends:
        for spec in SPECS.values():
            ask(backend.supports, spec, backend.name)
            num_asked += 1
        require(isinstance(backend.row_invariant, Support), f"{backend.name}: row_invariant is no Support")
    return f"{num_asked} asked"


def probe(bench: Bench) -> str:
    """Rates of memory and of products."""
    told = bench.platform.probe(PROBED_BYTES)
    if told is None:
        raise NotOfferedError("the platform measures no limits")
    require(isinstance(told, Probe), f"probe() returns {type(told).__name__}")
    require(told.read_bytes_per_second > 0, f"probe() says {told.read_bytes_per_second} bytes a second")
    for dtype, rate in told.ops_per_second.items():
        require(isinstance(dtype, torch.dtype) and rate > 0, f"probe() says {rate} operations a second in {dtype!r}")
    rates = [f"{rate / 1e9:.0f} G/s {str(dtype).removeprefix('torch.')}" for dtype, rate in told.ops_per_second.items()]
    return ", ".join([f"{told.read_bytes_per_second / 1e9:.1f} GB/s", *rates])


def philox(bench: Bench) -> str:
    """Sampling is core's, the same on every platform."""
    for counter, key, expected in KNOWN_ANSWERS:
        found = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))[0].tolist()
        require(tuple(found) == expected, f"counter {counter} and key {key} give {found}")
    return f"{len(KNOWN_ANSWERS)} vectors"


def graphs(bench: Bench) -> str:
    """No hook captures steps yet."""
    said = bench.capabilities.graph_capture
    raise NotOfferedError(f"the platform says graph_capture {said!r}; contract {CONTRACT} has no hook that captures")


def ranks(bench: Bench) -> str:
    """No hook joins ranks yet."""
    said = bench.capabilities.distributed_backend
    raise NotOfferedError(f"the platform says distributed_backend {said!r}; contract {CONTRACT} has no hook that joins")
