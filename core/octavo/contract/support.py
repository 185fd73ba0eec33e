"""The answer of everything that can be asked whether it can do something."""

from dataclasses import dataclass

__all__ = ["Support"]


@dataclass(frozen=True)
class Support:
    """Yes, or no and why. Truthful answers are checked: a yes that raises later is a fault.

    Attributes:
        ok: whether the call can be served.
        reasons: for a no, what stands in the way, each a short clause ("head size 80, built for 64 and 128");
            for a yes, remarks if any.

    """

    ok: bool
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.reasons, tuple) or not all(isinstance(reason, str) for reason in self.reasons):
            raise TypeError(f"reasons must be a tuple of texts, got {self.reasons!r:.200}")
        if not self.ok and not self.reasons:
            raise ValueError("a no needs a reason: it becomes the text that a user reads")

    @classmethod
    def yes(cls, *remarks: str) -> "Support":
        """It can be served."""
        return cls(True, remarks)

    @classmethod
    def no(cls, *reasons: str) -> "Support":
        """It cannot be served; at least one reason is required, since it becomes the error's text."""
        return cls(False, reasons)

    def __bool__(self) -> bool:
        return self.ok

    def __and__(self, other: "Support") -> "Support":
        """Both must hold; the reasons of every no are kept."""
        if self.ok and other.ok:
            return Support(True, self.reasons + other.reasons)
        return Support(False, tuple(r for s in (self, other) if not s.ok for r in s.reasons))

    def __str__(self) -> str:
        word = "yes" if self.ok else "no"
        return f"{word}: {'; '.join(self.reasons)}" if self.reasons else word
