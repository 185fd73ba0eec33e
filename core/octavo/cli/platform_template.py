"""What `octavo new-platform` writes: path to content. PACKAGE, CLASS and NAME stand for the platform's own."""

__all__ = ["FILES"]

PYPROJECT = """\
[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "octavo-NAME"
version = "0.1.0"
description = "The platform NAME for Octavo"
requires-python = ">=3.11"
dependencies = ["octavo>=0.1", "torch>=2.10"]

[project.optional-dependencies]
test = ["pytest>=8.2"]

[project.entry-points."octavo.platforms"]
NAME = "PACKAGE.platform"

[tool.setuptools]
packages = ["PACKAGE"]
"""

INIT = '''\
"""The platform NAME for Octavo: `platform` says what the device is, `ops` holds its kernels."""
'''

PLATFORM = '''\
"""The platform. It imports octavo.contract and nothing else of Octavo."""

import torch

from octavo.contract import Capabilities, MemoryInfo, OpImpl, Platform, PlatformError, PlatformInfo, hookimpl
from PACKAGE.ops import ops


class CLASS(Platform):
    """One device. Every hook that is not here has a default: see Octavo's docs/platforms.md."""

    name = "NAME"

    def __init__(self, index: int) -> None:
        # The first moment that may touch the device: open it here, never at import.
        if index != 0:
            raise PlatformError(f"device {index} of platform {self.name}; it has one, 0 (setting: device)")

    def capabilities(self) -> Capabilities:
        return Capabilities(dtypes=(torch.float32, torch.bfloat16), block_sizes=(16, 32, 8))

    @property
    def device(self) -> torch.device:
        return torch.get_default_device()  # torch.device("...") with torch's word for yours

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(free=4 << 30, total=8 << 30)  # bytes, as your driver tells them

    def ops(self) -> list[OpImpl]:
        return ops()


@hookimpl
def octavo_platforms() -> list[PlatformInfo]:
    return [
        PlatformInfo(
            name="NAME",
            api_version=(0, 9),  # of the contract that this was written for
            available=True,  # look for the driver, touch no device
            reason="a template, always there",
            create=CLASS,
            priority=-1,  # serves only who names it; above 0 it is chosen where it is available
        )
    ]
'''

OPS = '''\
"""Kernels. Each one that is missing here is served by a portable kernel, or by the reference in torch."""

import torch

from octavo.contract import OpImpl, OpSignature, RMSNorm, Support

DTYPES = (torch.float32, torch.bfloat16)


def ops() -> list[OpImpl]:
    by_row = Support.yes("each row is reduced by itself")
    return [OpImpl("rms_norm", "NAME", "native", rms_norm, supports=supports, row_invariant=by_row)]


def supports(signature: OpSignature) -> Support:
    """The answer is checked: a yes that raises later is a fault, and the reasons of a no are shown to users."""
    if signature.dtype not in DTYPES:
        return Support.no(f"dtype {signature.dtype}, built for {DTYPES}")
    if signature.trait("hidden_size", 0) > 8192:
        return Support.no(f"hidden size {signature.trait('hidden_size')}, built for up to 8192")
    return Support.yes()


def rms_norm(args: RMSNorm) -> torch.Tensor:
    """Launch your kernel here; this one is torch. What the arguments are: octavo.contract.RMSNorm."""
    x = args.x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + args.eps)
    if args.weight is not None:
        y = y * (args.weight.float() + args.weight_offset)
    return y.to(args.x.dtype)
'''

TEST = '''\
"""The platform does what the contract asks, and what it says of itself."""

from collections.abc import Iterator

import pytest

from octavo.testing import Bench, Check, checks

LEVEL = 0  # 1 once it has attention of its own


@pytest.fixture(scope="session")
def bench() -> Iterator[Bench]:
    with Bench("NAME") as bench:
        yield bench


@pytest.mark.parametrize("check", checks(LEVEL), ids=str)
def test_conformance(check: Check, bench: Bench) -> None:
    check.test(bench)
'''

FILES: dict[str, str] = {
    "pyproject.toml": PYPROJECT,
    "PACKAGE/__init__.py": INIT,
    "PACKAGE/platform.py": PLATFORM,
    "PACKAGE/ops.py": OPS,
    "tests/test_conformance.py": TEST,
}
