"""Sizes of cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

BATCHES = (1, 8, 64, 256)
QUICK_BATCHES = (1, 64)
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Shape:
    """Sizes of one step; hidden states are bfloat16."""

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
        """The sizes that differ from the reference, except the batch size."""
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
        """Short name, part of the case's label."""
        return f"b{self.batch}-{self.sizes}".rstrip("-")


REFERENCE = Shape(batch=1)
"""Reference sizes of the targets; the batch size varies."""
TINY = Shape(batch=1, hidden=48, vocab=211, k=2)
TINY_BATCHES = (1, 3)


def has_reference_sizes(shape: Shape) -> bool:
    """Return whether targets apply to ``shape``."""
    return replace(shape, batch=REFERENCE.batch) == REFERENCE


def variations(shape: Shape) -> list[Shape]:
    """Return variants of ``shape`` with one other value each: dtype of logits, K, H."""
    return [
        replace(shape, dtype="bfloat16"),
        replace(shape, k=1),
        replace(shape, k=7),
        replace(shape, hidden=4096),
    ]
