"""Once the table is frozen, a call of an op is the call of the platform's own function and of nothing around it."""

from typing import Any

import pytest
import torch
from doubles.platforms import ToyPlatform

from octavo.contract import API_VERSION, OPS, OpImpl, OpSignature
from octavo.hardware.resolve import OpResolver


@pytest.mark.parametrize("op", OPS)
def test_a_frozen_table_gives_the_bare_function(op: str) -> None:
    def kernel(args: Any) -> Any:
        return args

    resolver = OpResolver(ToyPlatform([OpImpl(op, "toy", "native", kernel, api_version=API_VERSION)]))
    signature = OpSignature(op, torch.float32, "cpu")
    resolver.resolve(signature)
    resolver.freeze()
    assert resolver.resolve(signature).fn is kernel
    assert resolver.resolve(signature) is resolver.resolve(signature)
