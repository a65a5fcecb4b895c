"""The verification modes that exist; a new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.contract import VerificationMode
from mtp_plugin.speculative.verification.relaxed import RelaxedVerification
from mtp_plugin.speculative.verification.residual import ResidualVerification
from mtp_plugin.speculative.verification.strict import StrictVerification
from mtp_plugin.speculative.verification.synthetic import SyntheticVerification

MODES: tuple[type[VerificationMode], ...] = (
    StrictVerification,
    ResidualVerification,
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


def label_of(options: DecodingOptions) -> Label | None:
    """What reports must say of the modes that a config enables; None: nothing."""
    labels = (mode.label(options) for mode in _enabled(options))
    return next((label for label in labels if label is not None), None)


def changes_text(modes: Iterable[VerificationMode], asked: Mapping[str, Any]) -> bool:
    """Whether drafts may change the text of a request that asks for these options, by name."""
    drafts = asked.get("speculate", True) and asked.get("max_draft_len") != 0
    return drafts and any(mode.is_labelled and mode.changes_text(asked) for mode in modes)


def refusals(modes: Iterable[VerificationMode], asked: Mapping[str, Any]) -> Iterator[str]:
    """Why a request that asks for these options, by name, cannot be served by these modes."""
    for mode in modes:
        yield from mode.refusals(asked)


def _enabled(options: DecodingOptions) -> list[type[VerificationMode]]:
    for asked in options.mtp.verifications:
        expect(
            asked in BUILT,
            ConfigError,
            f"mtp.verification: expected one of {', '.join(BUILT)}, got {asked!r}, which is not "
            "built in this version",
        )
    return [mode for mode in MODES if mode.is_enabled(options)]
