"""Where an engine's pieces come from: the ``get_spec_*`` of a line that the plugin is in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tests.contract_host.behaviours import HostClasses, SamplerArgs, package_classes
from tests.contract_host.line_rules import Line


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


def build_pieces(
    line: Line, factories: Factories, spec_config: Any, model_config: Any, sizes: Sizes
) -> Pieces:
    """Called in the host's order: worker with the model, then manager, sampler and metadata."""
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
    arguments: dict[str, Any] = {}
    if line.is_newer:
        # hosts without headroom pass no number of slots
        slots = sizes.num_seq_slots if sizes.num_seq_slots > sizes.max_num_requests else None
        arguments = {"max_seq_len": sizes.max_seq_len, "num_seq_slots": slots}

    def make_metadata() -> Any:
        return factories.get_spec_metadata(
            spec_config,
            model_config,
            sizes.max_num_requests,
            max_num_tokens=sizes.max_num_tokens,
            spec_resource_manager=manager,
            is_draft_model=False,
            **arguments,
        )

    return Pieces(worker, manager, sampler, make_metadata, factories.classes)


def installed_factories(line: Line) -> Factories:
    """Contents of a loaded package ``tensorrt_llm``, with an adapter installed."""
    utils = importlib.import_module("tensorrt_llm._torch.speculative.utils")
    return Factories(
        utils.get_spec_worker,
        utils.get_spec_resource_manager,
        utils.get_spec_decoder,
        utils.get_spec_metadata,
        package_classes(line),
    )
