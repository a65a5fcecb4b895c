"""The verification modes that exist; a new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.mode import VerificationMode
from mtp_plugin.speculative.verification.rejection import RejectionVerification
from mtp_plugin.speculative.verification.relaxed import RelaxedVerification
from mtp_plugin.speculative.verification.strict import StrictVerification
from mtp_plugin.speculative.verification.synthetic import SyntheticVerification

MODES: tuple[type[VerificationMode], ...] = (
    StrictVerification,
    RejectionVerification,
    RelaxedVerification,
    SyntheticVerification,
)

BUILT = tuple(asked for mode in MODES for asked in mode.verifications)
"""Values of ``mtp.verification`` that this version has a mode for."""


def check_modes(options: DecodingOptions) -> None:
    """Check the options of every mode that a config enables.

    Raises:
        ConfigError: options that cannot be, or a verification that this version does not have.
    """
    for mode in _enabled(options):
        mode.check(options)


def make_modes(options: DecodingOptions, device: torch.device) -> tuple[VerificationMode, ...]:
    """The modes that a config enables.

    Raises:
        ConfigError: as :func:`check_modes`.
    """
    check_modes(options)
    return tuple(mode(options, device) for mode in _enabled(options))


def most_draft_probs(options: DecodingOptions) -> int:
    """Drafts per slot of which a mode that a config enables reads what they were drawn from."""
    return max((mode.count_draft_probs(options) for mode in _enabled(options)), default=0)


def label_of(options: DecodingOptions, asked: Mapping[str, Any] | None = None) -> Label | None:
    """What reports must say of texts under a config; None: nothing.

    Args:
        asked: options that a request asks for, by name: what is said of its text. None: of any.
    """
    if asked is not None and not _drafts(asked):
        return None
    for mode in _enabled(options):
        label = mode.label(options)
        if label is not None and (asked is None or mode.changes_text(options, asked)):
            return label
    return None


def changes_text(options: DecodingOptions, asked: Mapping[str, Any]) -> bool:
    """Whether drafts may change the text of a request that asks for these options, by name."""
    return label_of(options, asked) is not None


def refusals(modes: Iterable[VerificationMode], asked: Mapping[str, Any]) -> Iterator[str]:
    """Why a request that asks for these options, by name, cannot be served by these modes."""
    for mode in modes:
        yield from mode.refusals(asked)


def _drafts(asked: Mapping[str, Any]) -> bool:
    return asked.get("speculate", True) and asked.get("max_draft_len") != 0


def _enabled(options: DecodingOptions) -> list[type[VerificationMode]]:
    for asked in options.mtp.verifications:
        expect(
            asked in BUILT,
            ConfigError,
            f"mtp.verification: expected one of {', '.join(BUILT)}, got {asked!r}, which is not "
            "built in this version",
        )
    return [mode for mode in MODES if mode.is_enabled(options)]
