"""The plugin installed in the generated package of a line: the source of an engine's components."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from mtp_plugin.hosts import tensorrt_llm as plugin
from mtp_plugin.hosts.tensorrt_llm import installation
from mtp_plugin.hosts.tensorrt_llm.seams import DISPATCHERS, UTILS
from tests.contract_host.behaviours import SamplerArgs, bodies, host_classes
from tests.contract_host.generated import fake_tree
from tests.contract_host.line_rules import Line


def installed_factories(line: Line) -> SimpleNamespace:
    """The ``get_spec_*`` of a loaded package ``tensorrt_llm``, and the host's classes."""
    utils = importlib.import_module(UTILS)
    return SimpleNamespace(
        **{name: getattr(utils, name) for name in DISPATCHERS}, classes=host_classes(line)
    )


@contextmanager
def installed(line: Line) -> Iterator[SimpleNamespace]:
    """The package of a line with the plugin in it; both are gone afterwards."""
    with fake_tree(line.name, behaviours=bodies(line)):
        plugin.install()
        try:
            yield installed_factories(line)
        finally:
            # a test that fails leaves engines running
            installation._installed[0].adapter.managers.clear()
            plugin.uninstall()


@dataclass(frozen=True)
class Sizes:
    """How much the host holds."""

    max_num_requests: int
    max_num_tokens: int
    max_seq_len: int
    num_seq_slots: int


def build_components(line: Line, config: Any, model_config: Any, sizes: Sizes) -> Any:
    """Called in the host's order: worker with the model, then manager, sampler and metadata."""
    host = installed_factories(line)
    mapping = SimpleNamespace(world_size=1, tp_size=1, pp_size=1, cp_size=1, rank=0)
    whole = SimpleNamespace(pretrained_config=model_config, mapping=mapping, spec_config=config)
    worker = host.get_spec_worker(config, whole, mapping, *[False] * line.is_newer)
    engine = SimpleNamespace(
        spec_config=config,
        model=SimpleNamespace(config=model_config),
        batch_size=sizes.max_num_requests,
        max_seq_len=sizes.max_seq_len,
        max_num_tokens=sizes.max_num_tokens,
    )
    manager = host.get_spec_resource_manager(engine, None)
    args = SamplerArgs(
        max_seq_len=sizes.max_seq_len,
        max_draft_len=config.max_draft_len,
        max_num_sequences=sizes.num_seq_slots,
        max_beam_width=1,
        max_total_draft_tokens=config.max_total_draft_tokens,
    )
    sampler = host.get_spec_decoder(args, config)
    # hosts without headroom pass no number of slots
    slots = sizes.num_seq_slots if sizes.num_seq_slots > sizes.max_num_requests else None
    newer = {"max_seq_len": sizes.max_seq_len, "num_seq_slots": slots} if line.is_newer else {}
    metadata = host.get_spec_metadata(
        config,
        model_config,
        sizes.max_num_requests,
        max_num_tokens=sizes.max_num_tokens,
        spec_resource_manager=manager,
        is_draft_model=False,
        **newer,
    )
    return SimpleNamespace(
        worker=worker, manager=manager, sampler=sampler, metadata=metadata, classes=host.classes
    )
