"""The plugin installed in the generated package of a line: where an engine's pieces come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mtp_plugin.hosts import tensorrt_llm as plugin
from mtp_plugin.hosts.tensorrt_llm import installation
from tests.contract_host.behaviours import bodies, package_classes
from tests.contract_host.fake_tree import fake_tree
from tests.contract_host.line_rules import Line
from tests.contract_host.pieces import Factories, installed_factories

UTILS = "tensorrt_llm._torch.speculative.utils"


@contextmanager
def installed(line: Line) -> Iterator[Factories]:
    """The package of a line with the plugin in it; both are gone afterwards."""
    behaviours = {**bodies(line), f"{UTILS}:get_spec_metadata": _metadata_of(line)}
    if line.is_newer:
        behaviours[f"{UTILS}:get_mtp_hidden_size"] = lambda config: config.hidden_size
    with fake_tree(line.name, behaviours=behaviours):
        plugin.install()
        try:
            yield installed_factories(line)
        finally:
            # a test that fails leaves engines running
            installation._installed[0].adapter.managers.clear()
            plugin.uninstall()


def _metadata_of(line: Line) -> Callable[..., Any]:
    """What the line's own ``get_spec_metadata`` does for MTP, as far as engines read it."""

    def get_spec_metadata(
        spec_config: Any,
        model_config: Any,
        max_num_requests: int,
        max_num_tokens: int,
        spec_resource_manager: Any = None,
        *_: Any,
    ) -> Any:
        classes = package_classes(line)
        shared = {
            "max_draft_len": spec_config.max_draft_len,
            "max_total_draft_tokens": spec_config.tokens_per_gen_step - 1,
            "spec_dec_mode": spec_config.spec_dec_mode,
            "max_num_requests": max_num_requests,
        }
        if spec_config.spec_dec_mode.is_mtp_vanilla() or not line.is_newer:
            return classes.vanilla_metadata(
                **shared,
                mtp_num_modules=spec_config.num_nextn_predict_layers,
                mtp_hidden_states_manager=spec_resource_manager,
            )
        return classes.eagle_metadata(
            **shared,
            num_layers=model_config.num_hidden_layers,
            hidden_size=model_config.hidden_size,
            max_num_tokens=max_num_tokens,
            spec_resource_manager=spec_resource_manager,
        )

    return get_spec_metadata
