"""TensorRT-LLM sampler that delegates to ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mtp_plugin.speculative.result_store import SampleStateTensorsMTP
from mtp_plugin.speculative.sampler import MTPSampler, SampleStateMTP


class SamplerBody:
    """Interface of the host's sampler, delegated to `mtp_plugin_sampler`.

    States and their tensors are of the host's own classes, by which executors detect speculation.
    """

    SampleState: ClassVar[Any]
    mtp_plugin_tensors: ClassVar[Any]
    """The host's class for the tensors of a state."""
    mtp_plugin_requests: ClassVar[str]
    """The field of the host's states with the requests: ``scheduled_requests`` or ``requests``."""
    mtp_plugin_sampler: MTPSampler

    @property
    def draft_len(self) -> int:
        """K."""
        return self.mtp_plugin_sampler.draft_len

    @property
    def max_seq_len(self) -> int:
        """Maximum number of tokens of a request."""
        return self.mtp_plugin_sampler.max_seq_len

    @property
    def store(self) -> Any:
        """Device tensors of the last step."""
        return self.mtp_plugin_sampler.store

    def is_generation_model(self) -> bool:
        """Return True."""
        return True

    @staticmethod
    def beam_width(scheduled_requests: Sequence[Any]) -> int:
        """Return 1: beam search is not supported."""
        return MTPSampler.beam_width(scheduled_requests)

    def should_provide_draft_probs(self, request: Any) -> bool:
        """Return False: draft probabilities stay on the device."""
        return self.mtp_plugin_sampler.should_provide_draft_probs(request)

    def setup_sampler_step(self, scheduled_requests: Any) -> None:
        """Do nothing."""

    def validate_request(self, request: Any) -> None:
        """Raises:
        ConfigError: the request needs something that is not served.
        """
        self.mtp_plugin_sampler.validate_request(request)

    def sample_async(
        self,
        scheduled_requests: Any,
        outputs: Any = None,
        num_context_logits_prefix_sum: Any = None,  # noqa: ARG002 - the host's signature
        resource_manager: Any = None,  # noqa: ARG002
        *,
        model_outputs: Any = None,
    ) -> Any:
        """Store a step's outputs and start their copy to the host."""
        given = outputs if outputs is not None else model_outputs
        own = self.mtp_plugin_sampler.sample_async(scheduled_requests, given)
        fields: dict[str, Any] = {"scheduled_requests": scheduled_requests}
        if self.mtp_plugin_requests == "requests":
            fields = {"requests": own.requests, "runtime_draft_len": own.runtime_draft_len}
        state = self.SampleState(
            **fields,
            device=self._tensors(own.device),
            host=self._tensors(own.host),
            sampler_event=own.sampler_event,
        )
        state.mtp_plugin = own
        return state

    def update_requests(self, state: Any, resource_manager: Any = None) -> None:  # noqa: ARG002
        """Append the tokens of a step to its requests.

        Raises:
            ExecutorError: no state of `sample_async`, or of the host's class.
        """
        own = getattr(state, "mtp_plugin", None)
        if own is None and not isinstance(state, self.SampleState):
            own = state  # refused by name
        if own is None:
            own = state.mtp_plugin = self._received(state)
        self.mtp_plugin_sampler.update_requests(own)

    def _tensors(self, own: Any) -> Any:
        if own is None:
            return None
        return self.mtp_plugin_tensors(
            new_tokens=own.new_tokens,
            new_tokens_lens=own.new_tokens_lens,
            next_draft_tokens=own.next_draft_tokens,
        )

    def _received(self, state: Any) -> SampleStateMTP:
        """Return our state for one that the host built itself (received from another rank)."""
        host = state.host
        return SampleStateMTP(
            scheduled_requests=getattr(state, "scheduled_requests", None),
            requests=list(getattr(state, "requests", None) or ()),
            host=host
            and SampleStateTensorsMTP(
                host.new_tokens, host.new_tokens_lens, host.next_draft_tokens
            ),
            sampler_event=state.sampler_event,
            runtime_draft_len=getattr(state, "runtime_draft_len", None),
        )


def sampler_class(base: type, state: Any, tensors: Any, requests: str) -> type:
    """Return a subclass of the host's base class of samplers that uses its state classes."""
    return type(
        "MTPPluginSampler",
        (SamplerBody, base),
        {
            "SampleState": state,
            "mtp_plugin_tensors": tensors,
            "mtp_plugin_requests": requests,
            "__module__": __name__,
        },
    )
