"""Run with TRITON_INTERPRET=1, which Triton reads when a kernel is defined: prints how far each case is off.

One JSON object: for each dtype and case of rms_norm the error over the reference's float64 value, and whether each
row alone gives the same bits.
"""

import json
import sys

import torch

from octavo.contract import Capabilities, RMSNorm
from octavo.contract.reference import rms_norm
from octavo.testing.cases_ops import CASES, DTYPES
from octavo.testing.ops import error
from octavo_triton.plugin import octavo_ops


def main() -> int:
    """Every case that the kernel says it serves."""
    (impl,) = octavo_ops(Capabilities(kernel_languages=("triton",)))
    found = {}
    for case in CASES:
        if case.op != impl.op:
            continue
        for dtype in DTYPES:
            assert impl.supports(case.signature(dtype, "cuda"))
            args = case.args(dtype)
            weight = None if args.weight is None else args.weight.double()
            truth = rms_norm(RMSNorm(args.x.double(), weight, args.eps, args.weight_offset))
            out = impl.fn(args)
            assert out.dtype == dtype
            alone = [impl.fn(RMSNorm(row[None], args.weight, args.eps, args.weight_offset))[0] for row in args.x]
            found[f"{case.label} {dtype}"] = {
                "error": error(out, truth),
                "rows": all(torch.equal(one, many) for one, many in zip(alone, out, strict=True)),
            }
    json.dump(found, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
