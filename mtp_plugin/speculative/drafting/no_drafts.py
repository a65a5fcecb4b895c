"""A worker without drafts, for decoding with K = 0."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.ops.step import Accepted
from mtp_plugin.speculative.drafting.forward_inputs import ForwardInputs
from mtp_plugin.speculative.drafting.public_steps import PublicSteps
from mtp_plugin.speculative.drafting.worker import SpecWorker


class NoDraftsWorker(PublicSteps, SpecWorker):
    """Returns the target's next token, and no drafts.

    Raises:
        ConfigError: the config has a K other than 0.
    """

    min_draft_len = 0

    def __init__(self, spec_config: Any, *args: Any, **options: Any) -> None:
        super().__init__(spec_config, *args, **options)
        expect(
            self.max_draft_len == 0,
            ConfigError,
            f"max_draft_len: expected 0 without drafts, got {self.max_draft_len}",
        )

    @override
    def _draft(
        self,
        step: ForwardInputs,
        accepted: Accepted,
        drafts: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        pass
