"""The check of quantised weights: products as the platform has them, and a served model."""

from itertools import product

from octavo.contract import WEIGHT_FORMATS
from octavo.model.precision import NEEDS
from octavo.sampling_params import SamplingParams
from octavo.testing.bench import PROMPTS, Bench
from octavo.testing.cases_ops import CASES, DTYPES
from octavo.testing.kernels import ask
from octavo.testing.ops import check_case, knows
from octavo.testing.outcome import NotOfferedError, require

__all__ = ["quantised"]

# Nats that a token's log-probability may be off by, on average over the prompts of the bench.
ALLOWED = {"int8": 0.1, "int4": 1.0}


def quantised(bench: Bench) -> str:
    """Each format that the platform takes: its own products on every case, and a served model in it."""
    formats = bench.platform.weight_formats()
    good = isinstance(formats, tuple) and set(formats) <= set(WEIGHT_FORMATS)
    require(good, f"weight_formats() must be a tuple of names among {', '.join(WEIGHT_FORMATS)}, got {formats!r}")
    if not formats:
        raise NotOfferedError("the platform takes dense weights alone; others are dequantised on load")
    served = [_own_products(bench, weight_format) for weight_format in formats]
    for quantization in [name for name, needed in NEEDS.items() if set(needed) <= set(formats)]:
        _close_to_dense(bench, quantization)
    return ", ".join(served)


def _own_products(bench: Bench, weight_format: str) -> str:
    dtypes = [dtype for dtype in DTYPES if dtype in bench.capabilities.dtypes or not bench.capabilities.dtypes]
    offered = [impl for impl in bench.own_ops + bench.shared_ops if impl.op == "linear"]
    done = 0
    for dtype, impl, case in product(dtypes, offered, CASES):
        if case.op != "linear" or case.traits["weight_format"] != weight_format:
            continue
        signature = case.signature(dtype, bench.device.type)
        if knows(impl, signature) and ask(impl.supports, signature, impl.provider):
            check_case(impl, case, signature, bench.device)
            done += 1
    require(done > 0, f"takes weights in {weight_format}, and none of its own linear ops does")
    return f"{weight_format}: {done} cases"


def _close_to_dense(bench: Bench, quantization: str) -> None:
    """A model of quantised weights says of each token what that of dense ones says, but for what bits can tell."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def told(setting: str) -> list[float]:
        with bench.engine(quantization=setting) as llm:
            outputs = llm.generate([list(prompt) for prompt in PROMPTS], params, use_tqdm=False)
        found: list[float] = []
        for output in outputs:
            require(output.error is None, f"in {setting} a request failed: {output.error}")
            rows = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
            found += [row[token_id].logprob for token_id, row in rows if row]
        return found

    pairs = list(zip(told("none"), told(quantization), strict=True))
    off, allowed = sum(abs(dense - small) for dense, small in pairs) / len(pairs), ALLOWED[quantization]
    require(off <= allowed, f"in {quantization} a token is {off:.3f} nats off on average, {allowed} are allowed")
