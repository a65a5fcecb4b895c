"""Putting the plugin into each recorded line and taking it out, and every way that goes wrong."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.errors import ConfigError, HostError
from mtp_plugin.hosts import tensorrt_llm as plugin
from mtp_plugin.hosts.tensorrt_llm import checks, installation
from mtp_plugin.hosts.tensorrt_llm import lines as api_versions
from mtp_plugin.hosts.tensorrt_llm.seams import DISPATCHERS, UTILS, holders
from mtp_plugin.speculative.drafting import MTPEagleWorker, MTPWorker
from tests.contract_host.behaviours import SamplerArgs, user_config
from tests.contract_host.generated import fake_tree
from tests.contract_host.installed import installed
from tests.contract_host.line_rules import LINES
from tests.contract_host.recorded import Function, load_line

lines = pytest.mark.parametrize("line", LINES)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    installation._installed.clear()


def engine(spec_config: Any) -> SimpleNamespace:
    """What a manager is built of."""
    config = SimpleNamespace(
        torch_dtype=torch.float32, hidden_size=8, vocab_size=64, num_hidden_layers=2
    )
    return SimpleNamespace(
        spec_config=spec_config,
        model=SimpleNamespace(config=config),
        batch_size=2,
        max_seq_len=32,
        max_num_tokens=64,
    )


def config_of(line: str, **options: Any) -> Any:
    config = user_config(LINES[line], 2, **options)
    config.num_nextn_predict_layers_from_model_config = 1
    if LINES[line].is_newer:
        config.num_nextn_predict_layers = 1
    return config


def dispatchers() -> dict[str, Any]:
    return {name: getattr(importlib.import_module(UTILS), name) for name in DISPATCHERS}


@lines
def test_every_place_is_rebound_and_put_back(line: str) -> None:
    with fake_tree(line):
        before = dispatchers()
        places = {
            f"{module.__name__}:{name}"
            for function in before.values()
            for module, name in holders(function)
        }
        status = plugin.install()
        assert status == plugin.status()
        assert (status.installed, status.line, status.engines) == (True, line, 0)
        assert set(status.rebound) == places
        assert len(places) > len(DISPATCHERS)  # those that import them by value
        assert not any(list(holders(function)) for function in before.values())
        assert f"API version {line}: {len(places)} names rebound, 0 engines running" in str(status)
        plugin.uninstall()
        assert dispatchers() == before
        assert {
            f"{module.__name__}:{name}"
            for function in before.values()
            for module, name in holders(function)
        } == places
        assert not plugin.status().installed


@lines
def test_modules_that_come_later_have_ours(line: str) -> None:
    """A module that imports by value once the plugin is in holds the wrapper, until it is out."""
    with fake_tree(line):
        original = dispatchers()["get_spec_worker"]
        plugin.install()
        late = ModuleType("tensorrt_llm.late")
        late.get_spec_worker = dispatchers()["get_spec_worker"]  # type: ignore[attr-defined]
        sys.modules[late.__name__] = late
        plugin.uninstall()
        assert late.get_spec_worker is original  # type: ignore[attr-defined]


@lines
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
def test_pieces_are_the_hosts_and_hold_ours(line: str, vanilla: bool) -> None:
    with installed(LINES[line]) as host:
        config = config_of(line, use_mtp_vanilla=vanilla)
        worker = host.get_spec_worker(config, None, None)
        assert isinstance(worker, host.classes.worker_base)
        assert isinstance(worker.mtp_plugin_worker, MTPWorker if vanilla else MTPEagleWorker)
        assert worker.max_draft_len == 2
        assert not list(worker.children())  # nothing for a loader of weights to find
        assert worker.set_guided_decoder(object()) is False
        manager = host.get_spec_resource_manager(engine(config))
        resources = importlib.import_module("tensorrt_llm._torch.pyexecutor.resource_manager")
        assert isinstance(manager, resources.BaseResourceManager)
        assert plugin.status().engines == 1
        sampler = host.get_spec_decoder(args_of(2), config)
        samplers = importlib.import_module("tensorrt_llm._torch.pyexecutor.sampler")
        assert isinstance(sampler, samplers.Sampler)
        assert sampler.SampleState is host.classes.state
        metadata = host.get_spec_metadata(
            config, engine(config).model.config, 2, 64, spec_resource_manager=manager
        )
        assert isinstance(
            metadata, host.classes.vanilla_metadata if vanilla else host.classes.eagle_metadata
        )
        manager.mtp_plugin_manager.add_dummy_requests([7])
        metadata.request_ids = [7]
        metadata.prepare()
        view = metadata.create_cuda_graph_metadata(1)
        view.prepare()
        if vanilla:
            own = manager.mtp_plugin_manager
            address = own.mtp_past_tokens_pool[own.slot_of(7)].data_ptr()
            for each in (metadata, view):
                assert int(each.mtp_past_tokens_ptrs[0]) == address
        manager.shutdown()
        assert plugin.status().engines == 0


def args_of(k: int) -> SamplerArgs:
    return SamplerArgs(
        max_seq_len=32,
        max_draft_len=k,
        max_num_sequences=2,
        max_beam_width=1,
        max_total_draft_tokens=k,
    )


@lines
def test_k_is_what_the_host_wrote_last(line: str) -> None:
    """A host may cut K after it has built the model, and the worker in it."""
    with installed(LINES[line]) as host:
        config = config_of(line)
        worker = host.get_spec_worker(config, None, None)
        config.max_draft_len = config.max_total_draft_tokens = 1
        assert worker.max_draft_len == 1


@lines
def test_other_configs_get_the_hosts_answer(line: str) -> None:
    with fake_tree(line, behaviours={f"{UTILS}:get_spec_worker": lambda *_: "the host's own"}):
        plugin.install()
        other = SimpleNamespace(
            spec_dec_mode=SimpleNamespace(
                is_mtp_vanilla=lambda: False, is_mtp_eagle_one_model=lambda: False
            )
        )
        tree, shared = config_of(line), config_of(line)
        tree.use_dynamic_tree = shared._use_shared_kv_cache = True
        for config in (other, None, tree, shared):
            assert dispatchers()["get_spec_worker"](config, None, None) == "the host's own"


@lines
def test_recorded_calls_bind(line: str) -> None:
    """Every recorded call of what is wrapped, and of the pieces that it gives."""
    facts = load_line(line)
    with installed(LINES[line]) as host:
        config = config_of(line)
        pieces = {
            "get_spec_worker": host.get_spec_worker,
            "get_spec_resource_manager": host.get_spec_resource_manager,
            "get_spec_decoder": host.get_spec_decoder,
            "get_spec_metadata": host.get_spec_metadata,
        }
        manager = host.get_spec_resource_manager(engine(config))
        sampler, worker = (
            host.get_spec_decoder(args_of(2), config),
            host.get_spec_worker(config, None, None),
        )
        for piece in (manager, sampler, worker):
            for name in (
                "prepare_resources",
                "free_resources",
                "add_dummy_requests",
                "update_resources",
                "sample_async",
                "update_requests",
                "validate_request",
                "skip_forward",
                "skip_drafting",
                "set_draft_model",
            ):
                if name in dir(type(piece)):
                    pieces[name] = getattr(piece, name)
        bound = 0
        for name, piece in pieces.items():
            for _, call in facts.calls(name):
                assert call.bind(inspect.signature(piece)), (name, call)
                bound += 1
        assert bound >= len(DISPATCHERS)
        manager.shutdown()


# ---- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_host")
def test_no_host() -> None:
    with pytest.raises(HostError, match=rf"^install\(\): {UTILS} cannot be imported: "):
        plugin.install()
    assert not plugin.is_installed()


@lines
def test_a_moved_name_is_reported(line: str) -> None:
    """The error lists what was looked for and what was found; nothing is changed."""
    with fake_tree(line, moved=True):
        with pytest.raises(HostError) as error:
            plugin.install()
        reported = str(error.value).splitlines()
        assert reported[0] == (
            "TensorRT-LLM: expected one of the API versions 1.2, 1.3a, 1.3b, got none of them. "
            "Nothing is installed. What each lacks:"
        )
        parameters = "(spec_config, model_config, mapping)"
        assert f"  {line}: {UTILS}:get_spec_worker{parameters}: not there" in reported
        assert {name for name in DISPATCHERS if any(name in row for row in reported)} == {
            *DISPATCHERS
        }
        assert not plugin.status().installed


def test_an_older_line_is_refused() -> None:
    """1.1 has the dispatchers of 1.2, and a config without a schedule of draft lengths."""
    facts = load_line("1.2")
    config = facts.modules["tensorrt_llm.llmapi.llm_args"].classes["MTPDecodingConfig"]
    config.fields = [each for each in config.fields if each.name != "draft_len_schedule"]
    for owner in facts.modules["tensorrt_llm.llmapi.llm_args"].classes.values():
        owner.fields = [each for each in owner.fields if each.name != "draft_len_schedule"]
    with fake_tree(facts):
        with pytest.raises(HostError, match=r"1\.2: .*:MTPDecodingConfig\(draft_len_schedule\): "):
            plugin.install()
        assert not plugin.is_installed()


@lines
def test_installed_twice(line: str) -> None:
    with fake_tree(line):
        plugin.install()
        with pytest.raises(
            HostError, match=r"^install\(\): mtp_plugin is installed in this process already$"
        ):
            plugin.install()
        assert plugin.status().line == line


def test_uninstalled_without_an_install() -> None:
    with pytest.raises(
        HostError, match=r"^uninstall\(\): mtp_plugin is not installed in this process$"
    ):
        plugin.uninstall()


@lines
def test_uninstalled_while_an_engine_runs(line: str) -> None:
    with installed(LINES[line]) as host:
        manager = host.get_spec_resource_manager(engine(config_of(line)))
        with pytest.raises(
            HostError,
            match=r"^uninstall\(\): 1 engines that use mtp_plugin are running; "
            r"shut them down first$",
        ):
            plugin.uninstall()
        assert plugin.is_installed()
        manager.shutdown()


@lines
def test_an_engine_built_before(line: str) -> None:
    """Its manager is none of ours."""
    config = config_of(line)
    expected = (
        r"^get_spec_metadata: spec_resource_manager: expected the plugin's manager, got NoneType: "
        r"the engine was built without the plugin$"
    )
    with installed(LINES[line]) as host, pytest.raises(ConfigError, match=expected):
        host.get_spec_metadata(config, engine(config).model.config, 2, 64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"sa_config": object()},
            "sa_config: not served with mtp_plugin: drafts are those of MTP layers; leave it out, "
            "or uninstall() the plugin",
        ),
        (
            {"mtp": MTPPluginOptions(adaptive_draft_len=True)},
            "mtp.adaptive_draft_len: not served inside TensorRT-LLM, whose ranks would measure "
            "different times and draft different numbers of tokens; use draft_len_schedule",
        ),
        (
            {"draft_skip_top_k_top_p": True},
            "draft_skip_top_k_top_p: expected False, got True: mtp_plugin truncates the "
            "distributions of drafts and targets alike",
        ),
        (
            {"advanced_sampling_mode": SimpleNamespace(value="skip_top_p")},
            "advanced_sampling_mode: expected 'full', got 'skip_top_p': mtp_plugin truncates "
            "the distributions of drafts and targets alike",
        ),
        (
            {"spec_dec_variant": 2},
            "spec_dec_variant: expected 1, got 2: mtp_plugin has one way to draft and verify",
        ),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], expected: str) -> None:
    with installed(LINES["1.3b"]) as host:
        config = config_of("1.3b")
        for name, value in options.items():
            setattr(config, name, value)
        with pytest.raises(ConfigError) as error:
            host.get_spec_worker(config, None, None)
        assert str(error.value) == expected


def test_hosts_without_a_separate_draft_engine() -> None:
    """Newer ones have no two-model speculation, and need no `draft_model_engine`."""
    facts = load_line("1.3b")
    factory = facts.modules[UTILS].functions["get_spec_resource_manager"]
    factory.parameters = factory.parameters[:1]
    with fake_tree(facts):
        assert plugin.install().line == "1.3b"


@lines
def test_a_base_that_wants_more_is_refused(line: str) -> None:
    """Before anything is changed."""
    facts = load_line(line)
    home = facts.modules["tensorrt_llm._torch.pyexecutor.resource_manager"]
    home.classes["BaseResourceManager"].methods["brand_new"] = Function(abstract=True)
    expected = (
        f"API version {line}: tensorrt_llm._torch.pyexecutor.resource_manager.BaseResourceManager "
        "has further abstract methods: brand_new"
    )
    with fake_tree(facts):
        before = dispatchers()
        with pytest.raises(HostError) as error:
            plugin.install()
        assert str(error.value) == expected
        assert dispatchers() == before
        assert checks.examine().problems == [expected]


@lines
def test_an_engine_that_shut_down_to_measure_its_memory_runs(line: str) -> None:
    with installed(LINES[line]) as host:
        manager = host.get_spec_resource_manager(engine(config_of(line)))
        manager.shutdown()
        assert plugin.status().engines == 0
        manager.add_dummy_requests([7])
        assert plugin.status().engines == 1
        manager.shutdown()


@lines
def test_no_slot_for_a_dummy_is_the_hosts_own_error(line: str) -> None:
    class NoFreeSlotsError(ValueError):
        pass

    with installed(LINES[line]) as host:
        module = importlib.import_module("tensorrt_llm._torch.pyexecutor.resource_manager")
        module.NoFreeSlotsError = NoFreeSlotsError
        manager = host.get_spec_resource_manager(engine(config_of(line)))
        with pytest.raises(NoFreeSlotsError, match="No free slots"):
            manager.add_dummy_requests(list(range(1, 40)))
        manager.shutdown()


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        ({"pp_size": 2, "pp_rank": 1, "world_size": 2}, "mapping"),
        ({"cp_size": 2, "world_size": 2}, "mapping"),
        ({"tp_size": 2, "world_size": 2}, "allgather"),
    ],
)
def test_ranks_that_cannot_be_are_refused_with_the_model(
    mapping: dict[str, int], expected: str
) -> None:
    with installed(LINES["1.3b"]) as host:
        sizes = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "rank": 0, **mapping}
        with pytest.raises((ConfigError, HostError), match=expected):
            host.get_spec_worker(config_of("1.3b"), None, SimpleNamespace(**sizes))


def test_ranks_that_are_not_mpis(caplog: pytest.LogCaptureFixture) -> None:
    """As under Ray, where every process is a world of its own."""
    with installed(LINES["1.3b"]) as host:
        utils = ModuleType("tensorrt_llm._utils")
        utils.mpi_comm = lambda: SimpleNamespace(Get_size=lambda: 1)  # type: ignore[attr-defined]
        sys.modules[utils.__name__] = utils
        mapping = SimpleNamespace(
            tp_size=2, pp_size=1, cp_size=1, world_size=2, rank=0, enable_attention_dp=True
        )
        host.get_spec_worker(config_of("1.3b"), None, mapping)
    assert "the ranks do not use MPI: those without mtp_plugin are not detected" in caplog.messages


# ---- the doctor ---------------------------------------------------------------------------------


@lines
def test_the_doctor_passes_a_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_tree(line):
        assert checks.main() == checks.OK
    output = capsys.readouterr().out
    releases = next(each.releases for each in api_versions.LINES if each.line == line)
    first = f"tensorrt_llm (no version)\nAPI version {line}, {releases}: supported\n"
    assert output.startswith(first)
    assert output.count("API version") == 1
    assert "NO" not in output.replace("NONE", "")
    assert output.endswith(f"trtllm-serve CHECKPOINT --config configs/trtllm/{line}_eagle.yaml\n")
    assert not plugin.is_installed()


@lines
def test_the_doctor_says_what_is_missing(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with fake_tree(line, moved=True):
        assert checks.main() == checks.PROBLEM
    output = capsys.readouterr().out
    assert f"  NO   {UTILS}:get_spec_decoder(sampler_args, spec_config)" in output
    assert "problem: none of the API versions 1.2, 1.3a, 1.3b\nnext: " in output
    assert output.count("API version ") == 3
    assert output.count(": not this one\n") == 3


def test_the_doctor_without_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    assert checks.main() == checks.PROBLEM
    output = capsys.readouterr().out
    assert output.startswith("problem: tensorrt_llm cannot be imported: no module (")
    assert output.count("\n") == 2
