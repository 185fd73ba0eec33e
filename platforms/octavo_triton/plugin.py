"""The plugin that offers Triton's kernels to platforms that can run them."""

from importlib.util import find_spec

from octavo.contract import Capabilities, OpImpl, OpSignature, Support, hookimpl

LANGUAGE = "triton"


@hookimpl
def octavo_ops(capabilities: Capabilities) -> list[OpImpl]:
    """The kernels, where the platform runs Triton; Triton itself is imported only then."""
    if LANGUAGE not in capabilities.kernel_languages:
        return []
    if find_spec("triton") is None:
        return [OpImpl("rms_norm", LANGUAGE, "portable", _never, supports=_not_installed)]
    from octavo_triton.rms_norm import rms_norm, supports

    return [
        OpImpl(
            "rms_norm",
            LANGUAGE,
            "portable",
            rms_norm,
            supports,
            graph_safe=True,  # once it has been compiled by a first call
            row_invariant=Support.yes("one program a row, its tile fixed by the hidden size"),
        )
    ]


def _not_installed(signature: OpSignature) -> Support:
    return Support.no("the package triton is not installed")


def _never(args: object) -> None:
    raise AssertionError("an implementation that supports nothing was called")
