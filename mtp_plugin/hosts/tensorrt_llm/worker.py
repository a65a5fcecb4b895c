"""TensorRT-LLM spec worker that delegates to ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

import torch

from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.speculative.drafting.worker import SpecWorker

_HELD = "_mtp_plugin_worker"


class WorkerBody:
    """Interface of the host's worker, delegated to ours.

    Our worker is built on first use, because the host may still change its config while it builds
    the model. It is not registered as a submodule: the host must not look for its weights.
    """

    mtp_plugin_make: Callable[[], SpecWorker]

    @property
    def mtp_plugin_worker(self) -> SpecWorker:
        """Our worker, built on first use.

        Raises:
            ConfigError: see its constructor.
        """
        held = self.__dict__.get(_HELD)
        if held is None:
            held = self.__dict__[_HELD] = self.mtp_plugin_make()
        return cast(SpecWorker, held)

    @property
    def max_draft_len(self) -> int:
        """K."""
        return self.mtp_plugin_worker.max_draft_len

    def mtp_plugin_run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
        **others: Any,
    ) -> dict[str, torch.Tensor]:
        """Run a step; arguments and result as in :meth:`SpecWorker.forward`."""
        own = self._prepared(attn_metadata, resource_manager)
        try:
            return own.forward(
                input_ids=input_ids,
                position_ids=position_ids,
                hidden_states=hidden_states,
                logits=logits,
                attn_metadata=attn_metadata,
                spec_metadata=spec_metadata,
                draft_model=draft_model,
                **others,
            )
        finally:
            vars(attn_metadata).pop("after_acceptance", None)

    def skip_forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,  # noqa: ARG002 - the host's signature
        resource_manager: Any = None,  # noqa: ARG002
    ) -> dict[str, torch.Tensor]:
        """Return outputs of the right shapes on ranks without logits."""
        return self.mtp_plugin_worker.skip_forward(
            input_ids,
            position_ids,
            hidden_states,
            logits,
            attn_metadata=attn_metadata,
            spec_metadata=spec_metadata,
        )

    def skip_drafting(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        attn_metadata: Any,
        spec_metadata: Any,
        draft_model: Any,
        resource_manager: Any = None,
    ) -> dict[str, torch.Tensor]:
        """Run a step without drafts: one token per request."""
        own = self._prepared(attn_metadata, resource_manager)
        try:
            return own.skip_drafting(
                input_ids,
                position_ids,
                hidden_states,
                logits,
                attn_metadata,
                spec_metadata,
                draft_model,
            )
        finally:
            vars(attn_metadata).pop("after_acceptance", None)

    def set_guided_decoder(self, guided_decoder: Any) -> bool:
        """Return False: guided decoding is not supported, so the host must refuse such requests."""
        return self.mtp_plugin_worker.set_guided_decoder(guided_decoder)

    def set_draft_model(self, draft_model: Any) -> None:
        """Accept the draft layers of the checkpoint; nothing of them is kept."""
        self.mtp_plugin_worker.set_draft_model(draft_model)

    def _prepared(self, attn_metadata: Any, resource_manager: Any) -> SpecWorker:
        """Return our worker with the host's draft KV cache, if it has one; ``after_acceptance`` of
        the attention metadata updates the host's recurrent states until the caller removes it."""
        own = self.mtp_plugin_worker
        update = _recurrent_states(self, attn_metadata)
        if update is not None:
            attn_metadata.after_acceptance = update
        # newer hosts have a view of the target's cache for drafts, whatever
        # use_separate_draft_kv_cache is; a host without the context cannot switch to it
        find = getattr(self, "get_draft_kv_cache_manager", None)
        cache = None if find is None else find(resource_manager)
        context = None if cache is None else getattr(self, "draft_kv_cache_context", None)
        if context is not None:
            own.draft_cache = partial(context, draft_kv_cache_manager=cache)
        elif own.draft_cache is not None:
            own.draft_cache = None
        return own


@lru_cache
def _takes_indices(cache: Any) -> bool:
    return "state_indices" in inspect.signature(cache.update_mamba_states).parameters


def _recurrent_states(worker: Any, attn_metadata: Any) -> Callable[[torch.Tensor], None] | None:
    """Return a function that advances the host's recurrent states by the accepted tokens before
    drafting, or None if this step has no such states."""
    if attn_metadata.num_generations == 0:
        return None
    cache = getattr(attn_metadata, "kv_cache_manager", None)
    update = getattr(cache, "update_mamba_states", None)
    # the newest API version also keeps states outside the cache
    handlers = getattr(worker, "_auxiliary_state_handlers", None)
    if update is None and not handlers:
        return None
    states = getattr(attn_metadata, "mamba_metadata", None)
    arguments: dict[str, Any] = {"attn_metadata": attn_metadata}
    if update is not None and _takes_indices(cast(Any, type(cache))):
        arguments["state_indices"] = states.state_indices  # type: ignore[union-attr]

    def after_acceptance(num_accepted: torch.Tensor) -> None:
        if update is not None:
            update(num_accepted_tokens=num_accepted, **arguments)
        if handlers:
            indices = states.state_indices[: len(num_accepted)]  # type: ignore[union-attr]
            worker.commit_auxiliary_speculative_states(
                num_accepted, indices, attn_metadata.num_contexts
            )

    return after_acceptance


def worker_class(base: type, method: str) -> type:
    """Return a subclass of the host's base class of workers that runs a step in ``method``."""
    run = WorkerBody.mtp_plugin_run
    return type("MTPPluginWorker", (WorkerBody, base), {method: run, "__module__": __name__})


def check_draft_cache(base: type) -> None:
    """Raises:
    ConfigError: the host's base class cannot switch to the KV cache of the draft layers.
    """
    for name in ("draft_kv_cache_context", "get_draft_kv_cache_manager"):
        expect(
            hasattr(base, name),
            ConfigError,
            f"use_separate_draft_kv_cache=True: {base.__module__}.{base.__name__} has no {name}",
        )
