"""An implementation of an op held against the formula, and against what it says of itself."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.contract import OPS, OpImpl, OpSignature, QuantizedWeight
from octavo.testing.cases_ops import TOLERANCE, OpCase
from octavo.testing.formulas import FORMULAS
from octavo.testing.guards import Guarded
from octavo.testing.outcome import CheckError, require

__all__ = ["check_case", "check_rows_alone", "check_truth", "error", "knows", "results"]

HOST = torch.device(torch.empty(0).device)
WRITTEN = {"fused_add_rms_norm": ("x", "residual"), "rotary_embedding": ("query", "key")}  # what an op may write into
BY_WHOLE = ("weight", "bias", "cos_sin", "logits")  # tensors that all rows share


def check_case(impl: OpImpl, case: OpCase, signature: OpSignature, device: torch.device = HOST) -> None:
    """A case that the implementation says it serves: no raise, the formula's values, and rows as claimed.

    Raises:
        CheckError: what is wrong, with the case.

    """
    dtype = signature.dtype
    try:
        args = case.args(dtype)
        slack = case.slack(args) if case.slack else None
        check_truth(impl, args, dtype, case.tolerance_factor, device, slack)
        if impl.row_invariant:
            check_rows_alone(impl, case, dtype, device)
    except CheckError as error:
        raise CheckError(f"{impl.provider}'s {signature}, case {case.label}: {error}") from error


def results(returned: Any) -> tuple[torch.Tensor, ...]:
    """What an op returned, always as a tuple."""
    return returned if isinstance(returned, tuple) else (returned,)


def error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, over the largest true value; infinite where one of them is no number."""
    require(got.shape == truth.shape, f"returns shape {tuple(got.shape)}, {tuple(truth.shape)} is right")
    if not truth.numel():
        return 0.0
    worst = float((got.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-30))
    return worst if worst == worst else float("inf")


def knows(impl: OpImpl, signature: OpSignature) -> bool:
    """Whether the implementation was written for a contract that has what the call uses; the core asks no others."""
    return impl.api_version >= OPS[signature.op].version_for(signature)


def check_truth(
    impl: OpImpl,
    args: Any,
    dtype: torch.dtype,
    factor: float = 1.0,
    device: torch.device = HOST,
    slack: npt.NDArray[np.float64] | None = None,
) -> None:
    """The results equal the formula's in shape, dtype and value, and nothing beside the arguments is touched.

    `slack` says how far each number of the first result may be off besides.

    Raises:
        CheckError: they do not.

    """
    of_output = OPS[impl.op].of_output
    truths, device = FORMULAS[impl.op](args), HOST if of_output else device
    placed, guards = _on_device(impl, args, device)
    got = _call(impl, placed)
    require(len(got) == len(truths), f"returns {len(got)} tensors, {len(truths)} are right")
    for one, truth in zip(got, truths, strict=True):
        right = torch.int64 if of_output else dtype
        require(one.dtype == right, f"returns {one.dtype}, {right} is right")
        require(one.device.type == device.type, f"returns a tensor on {one.device}, {device} is right")
        found, allowed = one.cpu(), TOLERANCE[dtype] * factor
        if of_output and found.shape == truth.shape:
            others = torch.nonzero(found != torch.from_numpy(truth)).flatten().tolist()
            require(not others, f"draws other tokens than the definition, in rows {others}")
        if slack is not None and found.shape == truth.shape:
            off = found.double() - torch.from_numpy(truth)
            found = torch.from_numpy(truth) + off.sign() * (off.abs() - torch.from_numpy(slack)).clamp(min=0)
        worst = error(found, torch.from_numpy(truth))
        require(worst <= allowed, f"is off by {worst:.2e} of the largest value, {allowed:.1e} is allowed")
    for name, guard in guards.items():
        guard.check(name, may_be_written=name in WRITTEN.get(impl.op, ()))


def check_rows_alone(impl: OpImpl, case: OpCase, dtype: torch.dtype, device: torch.device = HOST) -> None:
    """Each row of a case gives the same bits alone and beside the others.

    Raises:
        CheckError: it does not.

    """
    args = case.args(dtype)
    device = HOST if OPS[impl.op].of_output else device
    num_rows = len(getattr(args, type(args).__struct_fields__[0]))

    def run(rows: slice) -> list[torch.Tensor]:
        placed, _ = _on_device(impl, _rows(args, rows), device)
        return [one.cpu() for one in _call(impl, placed)]

    together = run(slice(None))
    for row in range(num_rows):
        for one, many in zip(run(slice(row, row + 1)), together, strict=True):
            same = torch.equal(one[0], many[row])
            require(same, f"claims that rows do not depend on each other, and row {row} of {num_rows} does")


def _call(impl: OpImpl, args: Any) -> tuple[torch.Tensor, ...]:
    try:
        got = results(impl.fn(args))
    except Exception as error:
        raise CheckError(f"says yes and raises {type(error).__name__}: {error}") from error
    kinds = ", ".join(type(one).__name__ for one in got)
    require(all(isinstance(one, torch.Tensor) for one in got), f"returns {kinds}, tensors are right")
    return got


def _on_device(impl: OpImpl, args: Any, device: torch.device) -> tuple[Any, dict[str, Guarded]]:
    """The same arguments on the device, amid guards; a weight as the implementation wants it."""
    guards: dict[str, Guarded] = {}
    fields: dict[str, Any] = {}
    for name in type(args).__struct_fields__:
        value = getattr(args, name)
        if isinstance(value, torch.Tensor):
            guards[name] = Guarded(value, device)
            value = guards[name].tensor
        elif isinstance(value, QuantizedWeight):
            value = value.to(device)
        fields[name] = value
    if impl.prepare is not None:
        try:
            fields["weight"] = impl.prepare(fields["weight"])
        except Exception as error:
            raise CheckError(f"says yes and its prepare raises {type(error).__name__}: {error}") from error
        guards.pop("weight", None)  # packed, it may be of any form, and the old one be gone
    return type(args)(**fields), guards


def _rows(args: Any, rows: slice) -> Any:
    """The args of some of the rows, copied, since an op may write into them."""

    def cut(name: str, value: Any) -> Any:
        return value[rows].clone() if isinstance(value, torch.Tensor) and name not in BY_WHOLE else value

    return type(args)(**{name: cut(name, getattr(args, name)) for name in type(args).__struct_fields__})
