"""The check that a draft loop restores the attention metadata (``mtp.check_metadata``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.errors import MetadataError


@dataclass(frozen=True)
class DeferredCheck:
    """Values of a field before and after a captured draft loop; every replay writes both."""

    name: str
    before: torch.Tensor
    after: torch.Tensor

    def verify(self) -> None:
        """Compare the values of the last replay; waits for the device.

        Raises:
            MetadataError: the field changed.
        """
        if not torch.equal(self.before, self.after):
            raise MetadataError(f"the draft loop left changes in: {self.name}")


_deferred: ContextVar[list[DeferredCheck] | None] = ContextVar("deferred checks", default=None)


@contextmanager
def deferred_checks() -> Iterator[list[DeferredCheck]]:
    """Context manager: collect the checks of a capture, to verify them after each replay."""
    checks: list[DeferredCheck] = []
    token = _deferred.set(checks)
    try:
        yield checks
    finally:
        _deferred.reset(token)


class MetadataFingerprint:
    """Values and identities of the fields of attention metadata, without its ``derived_fields``."""

    def __init__(self, fields: dict[str, Any], originals: dict[str, Any]) -> None:
        self._fields = fields
        self._originals = originals  # referenced, so that no new object gets the id of one

    @classmethod
    def take(cls, attn_metadata: Any) -> MetadataFingerprint:
        """Copy every field: tensors, numbers, lists, and the lists of ``kv_cache_params``."""
        fields: dict[str, Any] = {}
        originals: dict[str, Any] = {}
        for name, value in cls._walk(attn_metadata):
            if isinstance(value, torch.Tensor):
                fields[name] = value.clone()
                originals[name] = value
            elif isinstance(value, list):
                fields[name] = list(value)
                originals[name] = value
            elif isinstance(value, (int, float, str, bool)) or value is None:
                fields[name] = value
        return cls(fields, originals)

    def compare(self, attn_metadata: Any) -> None:
        """Check that no field has changed.

        While capturing, device values are checked by :func:`deferred_checks`.

        Raises:
            MetadataError: fields that changed, by name.
        """
        now = dict(self._walk(attn_metadata))
        changed = [name for name in self._fields if not self._same(name, now.get(name))]
        if changed:
            raise MetadataError(f"the draft loop left changes in: {', '.join(sorted(changed))}")

    def _same(self, name: str, value: Any) -> bool:
        before = self._fields[name]
        if isinstance(before, torch.Tensor):
            if not isinstance(value, torch.Tensor) or self._originals[name] is not value:
                return False
            if not (value.is_cuda and torch.cuda.is_current_stream_capturing()):
                return torch.equal(before, value)
            checks = _deferred.get()
            if checks is not None:
                checks.append(DeferredCheck(name, before, value.clone()))
            return True
        if isinstance(before, list) and self._originals[name] is not value:
            return False
        return bool(before == value)

    @staticmethod
    def _walk(attn_metadata: Any) -> list[tuple[str, Any]]:
        derived = getattr(attn_metadata, "derived_fields", ())
        fields = [(n, v) for n, v in vars(attn_metadata).items() if n not in derived]
        params = getattr(attn_metadata, "kv_cache_params", None)
        if params is not None and hasattr(params, "__dict__"):
            fields += [(f"kv_cache_params.{n}", v) for n, v in vars(params).items()]
        return fields
