"""In which precision the weights of a model are: what is asked for, what the platform takes, and what came out."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.contract import WEIGHT_FORMATS, QuantizedWeight, Weight

__all__ = ["DENSE", "NEEDS", "Precision", "Quantization", "told_weights"]

Quantization = Literal["auto", "none", "int8", "int4"]

# A setting -> the formats that a platform must take. 4 bits spoil an embedding and a head, and the way back of an MLP
# loses as much perplexity by them as all else in a layer; these take 8.
NEEDS: Mapping[str, tuple[str, ...]] = {"int8": ("int8",), "int4": ("int4", "int8")}


@dataclass(frozen=True)
class Precision:
    """What becomes of a slot's weights, by its role, see `Slot`.

    Attributes:
        quantization: the setting. "auto" keeps what a checkpoint has packed, "none" makes it dense too, "int8" and
            "int4" quantise floats, and keep what is packed in as many bits or fewer.
        formats: that the platform takes; others are dense.

    """

    quantization: Quantization
    formats: Collection[str] = ()

    def made(self, role: str) -> str | None:
        """The format that floats become; None where they stay what they are."""
        if role == "float" or self.quantization in ("auto", "none"):
            return None
        return "int8" if role in ("down", "table") else self.quantization

    def keeps(self, packed: str | None, role: str) -> bool:
        """Whether weights that are packed in a format stay as they are stored."""
        if packed is None or role == "float" or self.quantization == "none" or packed not in self.formats:
            return False
        made = self.made(role)
        return made is None or WEIGHT_FORMATS[packed] <= WEIGHT_FORMATS[made]


DENSE = Precision("none")


def told_weights(weights: Mapping[str, Weight]) -> str:
    """How many matrices are in which form, in a line ("int4 with mins: 120, int8: 1, bfloat16: 61")."""
    forms: Counter[str] = Counter()
    for weight in weights.values():
        if isinstance(weight, QuantizedWeight):
            forms[weight.format if weight.mins is None else f"{weight.format} with mins"] += 1
        elif weight.ndim > 1:
            forms[str(weight.dtype).removeprefix("torch.")] += 1
    return ", ".join(f"{form}: {count}" for form, count in forms.most_common())
