"""Any mutation of a config ends in a named error of the preflight, or in a model that runs."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from integration.random_models import write_random_checkpoint
from mtp_plugin.errors import MTPPluginError
from mtp_plugin.hosts.embedded.models import (
    FAMILIES,
    Preflight,
    load_model,
    preflight,
)
from mtp_plugin.hosts.embedded.models.config_reader import LIMITS, passed_keys

SECONDS = float(os.environ.get("MTP_FUZZ_SECONDS", "5"))
"""How long one case may take; a machine that is shared gets time."""
GROWTH = 1 << 20
"""KiB that a case may add to the most that the process ever held."""
EXAMPLES = int(os.environ.get("MTP_FUZZ_EXAMPLES", "25"))


def most_memory() -> int:
    """KiB that this process held at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


FOREIGN = [
    "_attn_implementation", "attn_implementation", "attribute_map", "auto_map", "custom_generate",
    "id2label", "is_encoder_decoder", "mlp_layer_types", "num_local_experts", "num_mtp_layers",
    "quantization_config", "return_dict", "sub_configs", "text_config", "transformers_weights",
    "__class__",
]  # fmt: skip
NUMBERS = (
    st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 96, 512, 513, 10**4, 10**6, 10**7])
    | st.sampled_from([2**31, 2**63, 10**30, 10**4000])
    | st.sampled_from([-1.0, 0.0, 1e-9, 0.1, 0.25, 0.3, 0.5, 1.0, 1.5, 2.0, 40.0, 1e6, 1e308])
)
WORDS = st.sampled_from(
    ["", "silu", "gelu", "xielu", "full_attention", "sliding_attention", "bfloat16", "float16",
     "org/kernel", "flash_attention_2", "\ud800", "\0", "x" * 10**4, "yarn", "dynamic"]
)  # fmt: skip
TYPES = ["default", "linear", "yarn", "llama3", "dynamic", "longrope", "axial", "proportional"]
ROPE_KEYS = [
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
    "original_max_position_embeddings", "partial_rotary_factor", "mscale", "mscale_all_dim",
    "attention_factor", "full_attention",
]  # fmt: skip
ROPES = st.builds(
    lambda kinds, numbers: {**kinds, **numbers},
    st.dictionaries(st.sampled_from(["rope_type", "type"]), st.sampled_from(TYPES) | NUMBERS),
    st.dictionaries(st.sampled_from(ROPE_KEYS), NUMBERS),
)
PLAIN = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.lists(st.just("full_attention"), max_size=4),
    st.dictionaries(st.sampled_from(["0", "", "AutoModel", "rope_type"]), PLAIN, max_size=2),
)
DROPPED = object()


def mutations(family: str) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.sampled_from(sorted({*passed_keys(FAMILIES[family]), *LIMITS}))
    change = st.one_of(
        st.tuples(keys, VALUES),
        st.tuples(keys, NUMBERS),
        st.tuples(keys, st.just(DROPPED)),
        st.tuples(st.sampled_from(["rope_scaling", "rope_parameters"]), ROPES),
        st.tuples(st.sampled_from(FOREIGN), VALUES),
    )
    return st.lists(change, min_size=1, max_size=3).map(dict)


def examined(path: Path) -> Preflight | MTPPluginError:
    try:
        return preflight(path)
    except MTPPluginError as error:
        return error


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    path = write_random_checkpoint(tmp_path_factory.mktemp("fuzzed"), request.param)
    return path, json.loads((path / "config.json").read_text())


def test_every_mutation_is_named_or_runs(
    written: tuple[Path, dict[str, Any]], plain_attention: Callable[..., Any]
) -> None:
    path, config = written

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize="MTP_FUZZ_EXAMPLES" not in os.environ,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changes=mutations(config["model_type"]))
    def check(changes: dict[str, Any]) -> None:
        kept = {k: v for k, v in {**config, **changes}.items() if v is not DROPPED}
        (path / "config.json").write_text(json.dumps(kept))
        start, before = perf_counter(), most_memory()
        found = examined(path)
        if isinstance(found, MTPPluginError):
            assert len(str(found)) < 4000
            assert perf_counter() - start < SECONDS
            assert most_memory() - before < GROWTH
            return
        model = load_model(path)
        ids = torch.arange(3, 8)
        positions = torch.arange(5)[None]
        states = model.forward_target(ids, positions, plain_attention(5))
        assert bool(model.lm_head(states).isfinite().all())
        for layer in model.mtp_layers:
            drafted = layer(
                embed_tokens=model.embed_tokens,
                input_ids=ids,
                position_ids=positions,
                hidden_states=states,
                attn_metadata=plain_attention(5),
            )
            assert drafted.shape == states.shape
        assert found.facts == model.facts
        assert perf_counter() - start < SECONDS
        assert most_memory() - before < GROWTH

    check()
