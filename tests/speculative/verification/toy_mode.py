"""A program with a mode of its own: a row of the table, a class, and the registry's line for it.

Prints as JSON what config, admission and slots make of its name.
"""

# ruff: noqa: E402 (the row stands in the table before anybody reads it)

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin import verifications

verifications.WAYS["dice"] = verifications.Way("by dice", ("greedy", "plain"), code=3)

from mtp_plugin.config import MTPDecodingConfig, MTPPluginOptions
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.kernels.backend import Backend
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.ops.acceptance import AcceptanceRules
from mtp_plugin.speculative.verification import (
    VerificationInputs,
    VerificationMode,
    make_modes,
    refusals,
    registry,
)


class Dice(VerificationMode):
    """Whatever stands, stands."""

    name = "dice"
    verifications = ("dice",)

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        return rules


registry.MODES = (*registry.MODES, Dice)
registry.BUILT = (*registry.BUILT, *Dice.verifications)


def refused(**mtp: Any) -> str:
    """What is said of a config that cannot be."""
    try:
        MTPPluginOptions(**mtp)
    except MTPPluginError as error:
        return str(error)
    return "nothing"


def format_value(verification: Any) -> Mapping[str, Any]:
    """What is made of a config, and of requests that ask for the mode."""
    config = MTPDecodingConfig(max_draft_len=2, mtp={"verification": verification})
    modes = make_modes(DecodingOptions.read(config), torch.device("cpu"))
    asked = {"verification": "dice"}
    facts = RequestFacts(1, StopRule(max_length=9), options=asked)
    return {
        "modes": [mode.name for mode in modes],
        "drafts": config.mtp.drafts_of("dice"),
        "refusals": list(refusals(modes, asked)),
        "of drafts": list(refusals(modes, {**asked, "draft_sampling": "coupled"})),
        "slot": modes[0].slot_values(facts, ()),
    }


if __name__ == "__main__":
    schema = MTPPluginOptions.model_json_schema()["properties"]["verification"]
    everything = {
        "one": format_value("dice"),
        "listed": format_value(["coupled", "dice"]),
        "asked": SamplingParams(verification="dice", draft_sampling="plain").requested_options(),
        "name": refused(verification=["coupled", "bones"]),
        "drafts": refused(verification="dice", draft_sampling="coupled"),
        "description": schema["description"],
    }
    sys.stdout.write(json.dumps(everything))
