"""A program with a mode of its own: an entry in the table, a class, and an entry in the registry.

Prints as JSON how config, admission and slots handle its name.
"""

# ruff: noqa: E402 (the table has the entry before other modules read it)

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin import verifications

verifications.METHODS["toy"] = verifications.VerificationMethod(
    "leaves the rules", ("greedy", "plain"), code=3
)

from mtp_plugin.config import MTPDecodingConfig, MTPPluginOptions
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.requests.stopping import StopRule
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts
from mtp_plugin.speculative.verification import (
    VerificationInputs,
    VerificationMode,
    make_modes,
    refusals,
    registry,
)


class ToyMode(VerificationMode):
    """Leaves the rules as they are."""

    name = "toy"
    verifications = ("toy",)

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        return rules


registry.MODES = (*registry.MODES, ToyMode)
registry.BUILT = (*registry.BUILT, *ToyMode.verifications)


def refused(**mtp: Any) -> str:
    """Return the error of an invalid config."""
    try:
        MTPPluginOptions(**mtp)
    except MTPPluginError as error:
        return str(error)
    return "nothing"


def describe(verification: Any) -> Mapping[str, Any]:
    """Describe the modes of a config, and a request that selects the mode."""
    config = MTPDecodingConfig(max_draft_len=2, mtp={"verification": verification})
    modes = make_modes(DecodingOptions.read(config), torch.device("cpu"))
    requested = {"verification": "toy"}
    facts = RequestFacts(1, StopRule(max_length=9), options=requested)
    return {
        "modes": [mode.name for mode in modes],
        "drafts": config.mtp.drafts_of("toy"),
        "refusals": list(refusals(modes, requested)),
        "of drafts": list(refusals(modes, {**requested, "draft_sampling": "coupled"})),
        "slot": modes[0].slot_values(facts, ()),
    }


if __name__ == "__main__":
    schema = MTPPluginOptions.model_json_schema()["properties"]["verification"]
    everything = {
        "one": describe("toy"),
        "listed": describe(["coupled", "toy"]),
        "requested": SamplingParams(verification="toy", draft_sampling="plain").requested_options(),
        "name": refused(verification=["coupled", "unknown"]),
        "drafts": refused(verification="toy", draft_sampling="coupled"),
        "description": schema["description"],
    }
    sys.stdout.write(json.dumps(everything))
