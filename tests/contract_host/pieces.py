# ruff: noqa: ARG002 - signatures are the host's
"""Where the pieces come from: four functions, called as a line calls its ``get_spec_*``.

Today they build `mtp_plugin.speculative` behind small adapters of the host's own classes; an
installed adapter takes their place here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch

from mtp_plugin.requests.admission import unsupported_options
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from mtp_plugin.speculative.host import DecodingOptions, RequestFacts, read_request
from mtp_plugin.speculative.sampler import OWN_OPTIONS, MTPSampler
from mtp_plugin.speculative.state import MTPHiddenStatesManager, SlotStateManager
from mtp_plugin.speculative.verification import make_modes
from tests.contract_host.behaviours import (
    BaseResourceManager,
    FinishReason,
    HostClasses,
    Sampler,
    SamplerArgs,
    host_classes,
)
from tests.contract_host.line_rules import Line

DEVICE = "cpu"
MANAGER = "mtp_hidden_states_manager"


@dataclass(frozen=True)
class Sizes:
    """How much the host holds."""

    max_num_requests: int
    max_num_tokens: int
    max_seq_len: int
    num_seq_slots: int


@dataclass(frozen=True)
class Pieces:
    """What an engine and its loop run."""

    worker: Any
    manager: Any
    sampler: Any
    make_metadata: Callable[[], Any]
    classes: HostClasses


@dataclass(frozen=True)
class Factories:
    """The ``get_spec_*`` of a line, and the host's classes that go with them."""

    get_spec_worker: Callable[..., Any]
    get_spec_resource_manager: Callable[..., Any]
    get_spec_decoder: Callable[..., Any]
    get_spec_metadata: Callable[..., Any]
    classes: HostClasses


def build_pieces(line: Line, spec_config: Any, model_config: Any, sizes: Sizes) -> Pieces:
    """Called in the host's order: worker with the model, then manager, sampler and metadata."""
    factories = find_factories(line)
    mapping = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, cp_size=1, rank=0)
    whole = SimpleNamespace(
        pretrained_config=model_config, mapping=mapping, spec_config=spec_config
    )
    separate_cache = (False,) if line.is_newer else ()
    worker = factories.get_spec_worker(spec_config, whole, mapping, *separate_cache)
    engine = SimpleNamespace(
        spec_config=spec_config,
        model=SimpleNamespace(config=model_config),
        batch_size=sizes.max_num_requests,
        max_seq_len=sizes.max_seq_len,
        max_num_tokens=sizes.max_num_tokens,
    )
    manager = factories.get_spec_resource_manager(engine, None)
    args = SamplerArgs(
        max_seq_len=sizes.max_seq_len,
        max_draft_len=spec_config.max_draft_len,
        max_num_sequences=sizes.num_seq_slots,
        max_beam_width=1,
        max_total_draft_tokens=spec_config.max_total_draft_tokens,
    )
    sampler = factories.get_spec_decoder(args, spec_config)
    told: dict[str, Any] = {}
    if line.is_newer:
        told = {"max_seq_len": sizes.max_seq_len, "num_seq_slots": sizes.num_seq_slots}

    def make_metadata() -> Any:
        return factories.get_spec_metadata(
            spec_config,
            model_config,
            sizes.max_num_requests,
            sizes.max_num_tokens,
            spec_resource_manager=manager,
            is_draft_model=False,
            **told,
        )

    return Pieces(worker, manager, sampler, make_metadata, factories.classes)


def find_factories(line: Line) -> Factories:
    """The seam."""
    return _Direct(line).factories()


# ---- until there is an adapter to install -------------------------------------------------------


class _Direct:
    """Adapters of one line, made around the pieces."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.classes = host_classes(line)
        self.served: frozenset[str] = frozenset()

    def factories(self) -> Factories:
        return Factories(
            self.get_spec_worker,
            self.get_spec_resource_manager,
            self.get_spec_decoder,
            self.get_spec_metadata,
            self.classes,
        )

    def get_spec_worker(
        self, spec_config: Any, model_config: Any, mapping: Any, separate: bool = False
    ) -> Any:
        is_vanilla = spec_config.spec_dec_mode.is_mtp_vanilla()
        ours = (MTPWorker if is_vanilla else MTPEagleWorker)(
            spec_config, model_config, separate, mapping=mapping, device=DEVICE
        )
        self.served = ours.served_options

        def step(self: Any, **inputs: Any) -> Any:
            inputs.pop("resource_manager", None)
            return self.ours(**inputs)

        body = {
            self.line.implements: step,
            "max_draft_len": property(lambda self: self.ours.max_draft_len),
        }
        worker = type("SpecWorker", (self.classes.worker_base,), body)()
        worker.ours = ours
        return worker

    def get_spec_resource_manager(self, model_engine: Any, draft_model_engine: Any = None) -> Any:
        """Eagle gets one too."""
        config, model = model_engine.spec_config, model_engine.model.config
        told = {"device": DEVICE, "vocab_size": model.vocab_size}
        batch = model_engine.batch_size
        ours: SlotStateManager
        if config.spec_dec_mode.is_mtp_vanilla():
            ours = MTPHiddenStatesManager(
                config, model.torch_dtype, model.hidden_size, batch, **told
            )
        else:
            modes = make_modes(DecodingOptions.read(config), torch.device(DEVICE))
            ours = SlotStateManager(modes, batch, **told)
        return _Manager(ours, self.served, model_engine.max_seq_len)

    def get_spec_decoder(self, sampler_args: Any, spec_config: Any) -> Any:
        ours = MTPSampler(
            sampler_args,
            nextn=spec_config.max_draft_len,
            device=DEVICE,
            finish_reasons=FinishReason,
            served_options=self.served,
        )
        return _sampler_class(self.line, self.classes)(ours)

    def get_spec_metadata(
        self,
        spec_config: Any,
        model_config: Any,
        max_num_requests: int,
        max_num_tokens: int,
        spec_resource_manager: Any = None,
        is_draft_model: bool = False,
        **told: Any,
    ) -> Any:
        is_vanilla = spec_config.spec_dec_mode.is_mtp_vanilla()
        base = self.classes.vanilla_metadata if is_vanilla else self.classes.eagle_metadata
        names = {field.name for field in fields(base)}
        held_as = MANAGER if MANAGER in names else "spec_resource_manager"
        body: dict[str, Any] = {"prepare": _prepare, "manager_name": held_as}
        if held_as != MANAGER:
            body[MANAGER] = property(lambda self: self.spec_resource_manager)
        if "context_prompt_lookahead_tokens" in names:
            body["next_prompt_tokens"] = property(lambda self: self.context_prompt_lookahead_tokens)
        return type("SpecMetadata", (base,), body)(
            max_num_requests=max_num_requests,
            max_draft_len=spec_config.max_draft_len,
            max_total_draft_tokens=spec_config.tokens_per_gen_step - 1,
            spec_dec_mode=spec_config.spec_dec_mode,
            **{held_as: spec_resource_manager},
        )


def _prepare(self: Any) -> None:
    """What the requests ask for, by their ids: not every line tells metadata the requests."""
    super(type(self), self).prepare()
    facts = getattr(self, self.manager_name).facts
    asked = [facts[request_id] for request_id in self.request_ids if request_id in facts]
    self.edits_logits = any(fact.edits_logits for fact in asked)
    self.only_draws = self.edits_logits and all(fact.only_draws for fact in asked)


class _Manager(BaseResourceManager):
    """Ours, under the host's base; its slot manager knows the sentinel of padding ids."""

    def __init__(self, ours: SlotStateManager, served: frozenset[str], max_seq_len: int) -> None:
        self.ours = ours
        self.served = served | OWN_OPTIONS
        self.max_seq_len = max_seq_len
        self.slot_manager = _Slots(ours)
        self.facts: dict[int, RequestFacts] = {}

    def get_max_resource_count(self) -> int:
        return self.ours.get_max_resource_count()

    def get_needed_resource_to_completion(self, request: Any) -> int:
        return self.ours.get_needed_resource_to_completion(request)

    def prepare_resources(self, scheduled_batch: Any) -> None:
        for request in scheduled_batch.context_requests:
            # who has facts may ask for more than first choices
            if request.is_first_context_chunk and not unsupported_options(
                request, served=self.served
            ):
                request.facts = read_request(request, self.max_seq_len)
                self.facts[request.request_id] = request.facts
        self.ours.prepare_resources(scheduled_batch)

    def free_resources(self, request: Any) -> None:
        self.ours.free_resources(request)
        self.facts.pop(request.request_id, None)

    def add_dummy_requests(self, request_ids: Any) -> None:
        self.ours.add_dummy_requests(request_ids)

    def shutdown(self) -> None:
        self.ours.shutdown()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ours, name)


class _Slots:
    def __init__(self, ours: SlotStateManager) -> None:
        self.ours = ours

    @property
    def slot_mapping(self) -> dict[int, int]:
        return self.ours.slot_manager.slot_mapping

    def get_slot(self, request_id: int) -> int:
        return self.ours.slot_of(request_id)


def _sampler_class(line: Line, classes: HostClasses) -> type:
    class SpecSampler(Sampler):
        SampleState = classes.state

        def __init__(self, ours: MTPSampler) -> None:
            self.ours = ours

        def is_generation_model(self) -> bool:
            return self.ours.is_generation_model()

        def validate_request(self, request: Any) -> None:
            self.ours.validate_request(request)

        def sample_async(
            self, scheduled_requests: Any, outputs: Any, num_context_logits_prefix_sum: Any
        ) -> Any:
            state = self.ours.sample_async(scheduled_requests, outputs)
            kept: dict[str, Any] = {"scheduled_requests": scheduled_requests}
            if line.is_newer:
                kept = {"requests": state.requests, "runtime_draft_len": state.runtime_draft_len}
            told = classes.state(
                device=_tensors(classes, state.device),
                host=_tensors(classes, state.host),
                sampler_event=state.sampler_event,
                **kept,
            )
            told.ours = state
            return told

        def update_requests(self, state: Any, resource_manager: Any = None) -> None:
            self.ours.update_requests(state.ours)

    return SpecSampler


def _tensors(classes: HostClasses, ours: Any) -> Any:
    return classes.tensors(
        new_tokens=ours.new_tokens,
        new_tokens_lens=ours.new_tokens_lens,
        next_draft_tokens=ours.next_draft_tokens,
    )
