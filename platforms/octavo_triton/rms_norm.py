"""The root mean square norm: one program a row, the whole row in one tile."""

import math

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from octavo.contract import OpSignature, RMSNorm, Support

__all__ = ["kernel", "rms_norm", "supports"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HIDDEN_SIZE = 65536  # a row is held in registers
ELEMENTS_A_WARP = 512


@triton.jit  # type: ignore[untyped-decorator]
def kernel(  # type: ignore[no-untyped-def]
    out, x, weight, stride, hidden_size, eps, weight_offset, has_weight: tl.constexpr, tile: tl.constexpr
):
    """Row `program_id(0)` of `out` [T, H] from that of `x`, whose rows are `stride` elements apart."""
    # Operands go to float32 right after each load: Triton's interpreter computes bfloat16 wrongly.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, tile)
    inside = column < hidden_size
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(value * value, 0) / hidden_size
    y = value * tl.rsqrt(mean_square + eps)
    if has_weight:
        y *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
    tl.store(out + row * hidden_size + column, y.to(out.dtype.element_ty), mask=inside)


INTERPRETED = not isinstance(kernel, JITFunction)  # decided by Triton, from its environment


def supports(signature: OpSignature) -> Support:
    """Rows that fit a tile, in the usual types, on a device that Triton compiles for."""
    answer = Support.yes()
    hidden_size = signature.trait("hidden_size", 0)
    if hidden_size > MAX_HIDDEN_SIZE:
        answer &= Support.no(f"hidden size {hidden_size}, a row of at most {MAX_HIDDEN_SIZE} fits a tile")
    if signature.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        answer &= Support.no(f"dtype {str(signature.dtype).removeprefix('torch.')}, built for {known}")
    if signature.device_type == "cpu" and not INTERPRETED:
        answer &= Support.no("Triton compiles nothing for host memory, and its interpreter is off")
    return answer


def rms_norm(args: RMSNorm) -> torch.Tensor:
    """See `RMSNorm`."""
    x = args.x
    hidden_size = x.shape[-1]
    rows = x.reshape(-1, hidden_size)  # a view unless leading axes cannot be merged
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    tile = triton.next_power_of_2(hidden_size)
    kernel[(len(rows),)](
        out,
        rows,
        rows if args.weight is None else args.weight,
        rows.stride(0),
        hidden_size,
        args.eps,
        args.weight_offset,
        has_weight=args.weight is not None,
        tile=tile,
        num_warps=min(16, max(1, math.ceil(tile / ELEMENTS_A_WARP))),
    )
    return out
