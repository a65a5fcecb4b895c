"""The sizes of a case, and which sizes a run covers."""

from __future__ import annotations

from dataclasses import dataclass, replace

BATCHES = (1, 8, 64, 256)
QUICK_BATCHES = (1, 64)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """Sizes of one step; the states of the model are bfloat16 throughout."""

    batch: int
    hidden: int = 7168
    vocab: int = 129280
    k: int = 3
    dtype: str = "float32"  # of the logits

    @property
    def rows(self) -> int:
        """Rows of the target's logits: K+1 per generation."""
        return self.batch * (self.k + 1)

    @property
    def logit_bytes(self) -> int:
        """Bytes of one logit."""
        return 4 if self.dtype == "float32" else 2

    @property
    def target_bytes(self) -> int:
        """Bytes of the target's logits."""
        return self.rows * self.vocab * self.logit_bytes

    @property
    def draft_bytes(self) -> int:
        """Bytes of all draft heads' logits."""
        return self.k * self.batch * self.vocab * self.logit_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one hidden state."""
        return self.hidden * 2

    @property
    def sizes(self) -> str:
        """What differs from the reference sizes, whatever the batch."""
        named = {
            "hidden": f"h{self.hidden}",
            "vocab": f"v{self.vocab}",
            "k": f"k{self.k}",
            "dtype": self.dtype,
        }
        return "-".join(
            text for name, text in named.items() if getattr(self, name) != getattr(REFERENCE, name)
        )

    @property
    def label(self) -> str:
        """A short name, part of the case's."""
        return f"b{self.batch}-{self.sizes}".rstrip("-")


REFERENCE = Shape(batch=1)
"""The sizes that the targets are for, whatever the batch."""
TINY = Shape(batch=1, hidden=48, vocab=211, k=2)
TINY_BATCHES = (1, 3)


def has_reference_sizes(shape: Shape) -> bool:
    """Whether a target applies to ``shape``."""
    return replace(shape, batch=REFERENCE.batch) == REFERENCE


def variations(shape: Shape) -> list[Shape]:
    """``shape`` with one other size at a time: the logits' type, K, H."""
    return [
        replace(shape, dtype="bfloat16"),
        replace(shape, k=1),
        replace(shape, k=7),
        replace(shape, hidden=4096),
    ]
