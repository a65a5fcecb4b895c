"""The registry of verification modes; a new mode is a file in this folder and an entry here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.custom import CustomVerificationMode
from mtp_plugin.speculative.verification.mode import VerificationMode
from mtp_plugin.speculative.verification.rejection import RejectionVerification
from mtp_plugin.speculative.verification.relaxed import RelaxedVerification
from mtp_plugin.speculative.verification.strict import StrictVerification
from mtp_plugin.speculative.verification.synthetic import SyntheticVerification
from mtp_plugin.verifications import custom_codes, is_custom

MODES: tuple[type[VerificationMode], ...] = (
    StrictVerification,
    RejectionVerification,
    CustomVerificationMode,
    RelaxedVerification,
    SyntheticVerification,
)

BUILT = tuple(name for mode in MODES for name in mode.verifications)
"""Values of ``mtp.verification`` that a mode implements."""


def check_modes(options: DecodingOptions) -> None:
    """Check the options of every mode that a config enables.

    Raises:
        ConfigError: invalid options, or a verification method that no mode implements.
    """
    for mode in _enabled(options):
        mode.check(options)


def make_modes(options: DecodingOptions, device: torch.device) -> tuple[VerificationMode, ...]:
    """Create the modes that a config enables.

    Raises:
        ConfigError: as :func:`check_modes`.
    """
    check_modes(options)
    return tuple(mode(options, device) for mode in _enabled(options))


def most_draft_probs(options: DecodingOptions) -> int:
    """Return for how many drafts per slot the manager keeps ``draft_probs``, 0 for none."""
    return max((mode.count_draft_probs(options) for mode in _enabled(options)), default=0)


def label_of(options: DecodingOptions, requested: Mapping[str, Any] | None = None) -> Label | None:
    """Return the label of outputs that drafts may change under a config; None: lossless.

    Args:
        requested: options of a request, by name, whose output is meant; None: any request's.
    """
    if requested is not None and not _has_drafts(requested):
        return None
    for mode in _enabled(options):
        label = mode.label(options)
        if label is not None and (requested is None or mode.changes_text(options, requested)):
            return label
    return None


def changes_text(
    modes: Iterable[VerificationMode], options: DecodingOptions, requested: Mapping[str, Any]
) -> bool:
    """Return whether drafts may change the output of a request with these options.

    Args:
        modes: those that were created for the config.
    """
    return _has_drafts(requested) and any(mode.changes_output(options, requested) for mode in modes)


def refusals(modes: Iterable[VerificationMode], requested: Mapping[str, Any]) -> Iterator[str]:
    """Yield why a request with these options cannot be served by these modes."""
    for mode in modes:
        yield from mode.refusals(requested)


def _has_drafts(requested: Mapping[str, Any]) -> bool:
    return requested.get("speculate", True) and requested.get("max_draft_len") != 0


def _enabled(options: DecodingOptions) -> list[type[VerificationMode]]:
    for name in options.mtp.verifications:
        expect(
            name in BUILT or is_custom(name),
            ConfigError,
            f"mtp.verification: expected one of {', '.join([*BUILT, *custom_codes()])}, got "
            f"{name!r}, which is not registered in this process",
        )
    return [mode for mode in MODES if mode.is_enabled(options)]
