"""`MTPDecodingConfig`: alone and over the host's class of each line, it says the same of K."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mtp_plugin.config import MTPPluginOptions, SpeculativeDecodingMode
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.tensorrt_llm import config as config_module
from mtp_plugin.hosts.tensorrt_llm import ranks
from mtp_plugin.hosts.tensorrt_llm.config import ConfigWithoutHost, decoding_config_class
from mtp_plugin.speculative.host import DecodingOptions
from tests.hosts.tensorrt_llm.tiny_host import LINES, run_python, write_host

Put = Callable[..., None]
ALONE = "alone"
EVERYWHERE = (ALONE, *LINES)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str:
    """The config class: without a host, or derived from an API version's."""
    if request.param == ALONE:
        request.getfixturevalue("no_host")
    else:
        request.getfixturevalue("host")(request.param)
    return str(request.param)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
class TestEverywhere:
    @pytest.mark.parametrize("name", ["max_draft_len", "num_nextn_predict_layers"])
    def test_k_by_either_name(self, place: str, name: str) -> None:
        config = decoding_config_class()(**{name: 3})
        assert (config.max_draft_len, config.max_total_draft_tokens) == (3, 3)
        assert DecodingOptions.read(config).max_draft_len == 3
        if place in ("1.2rc", "1.2"):
            assert config.num_nextn_predict_layers == 3

    def test_the_older_name_can_be_assigned(self, place: str) -> None:
        config = decoding_config_class()(max_draft_len=3)
        config.num_nextn_predict_layers = 2
        assert (config.num_nextn_predict_layers, config.max_draft_len) == (2, 3)
        if place in (ALONE, "1.3a", "1.3b"):
            vanilla = (SpeculativeDecodingMode.MTP, "vanilla")
            assert config.spec_dec_mode in vanilla

    def test_eagle_until_the_checkpoint_is_known(self) -> None:
        config = decoding_config_class()(max_draft_len=3)
        assert config.spec_dec_mode in (SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL, "eagle")
        vanilla = decoding_config_class()(max_draft_len=3, use_mtp_vanilla=True)
        assert vanilla.spec_dec_mode in (SpeculativeDecodingMode.MTP, "vanilla")

    def test_names_of_other_lines(self, place: str) -> None:
        config = decoding_config_class()(
            decoding_type="MTP",
            max_draft_len=2,
            use_advanced_mtp_sampler=True,
            use_advanced_spec_dec_sampling=True,
            allow_advanced_sampling=False,
            mtp_eagle_one_model=True,
            moe_backend=None,
            spec_dec_variant=1,
            begin_thinking_phase_token=5,
            speculative_model="heads",
            num_nextn_predict_layers_from_model_config=2,
        )
        begin = "BEGIN_THINKING_PHASE_TOKEN" if place == "1.2rc" else "begin_thinking_phase_token"
        assert getattr(config, begin) == 5
        model = "speculative_model_dir" if place == "1.2rc" else "speculative_model"
        assert getattr(config, model) == "heads"
        assert config.spec_dec_mode in (SpeculativeDecodingMode.MTP, "vanilla")
        upper = decoding_config_class()(BEGIN_THINKING_PHASE_TOKEN=6, speculative_model_dir="dir")
        assert (getattr(upper, begin), getattr(upper, model)) == (6, "dir")

    @pytest.mark.parametrize("given", [{"seed": 3}, MTPPluginOptions(seed=3)])
    def test_options_of_the_plugin(self, given: Any) -> None:
        config = decoding_config_class()(max_draft_len=2, mtp=given)
        assert config.mtp == MTPPluginOptions(seed=3)
        config.mtp = {"verification": "block"}
        assert config.mtp == MTPPluginOptions(verification="block")
        assert decoding_config_class()().mtp == MTPPluginOptions()

    def test_written_and_read_again_only_given_options_count_as_given(self) -> None:
        model = decoding_config_class()
        config = model(max_draft_len=2, mtp={"seed": 3})
        for read in (
            model.model_validate_json(config.model_dump_json()),
            model.model_validate(config.model_dump()),
        ):
            assert read.mtp == MTPPluginOptions(seed=3)
            assert read.mtp.model_fields_set == {"seed"}
            assert read.max_draft_len == 2
        unset = model.model_validate_json(model(max_draft_len=2).model_dump_json())
        assert unset.mtp.model_fields_set == set()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"mtp": {"sead": 3}}, "mtp: sead: unknown key; did you mean seed?"),
            ({"mtp": 3}, "mtp: expected a mapping of the plugin's options, got 3"),
            (
                {"use_advanced_mtp_sampler": "yes"},
                "use_advanced_mtp_sampler: expected false or true, got 'yes'",
            ),
        ],
    )
    def test_mistakes(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            decoding_config_class()(**options)
        assert str(caught.value) == message

    def test_mistakes_in_assigned_options(self) -> None:
        config = decoding_config_class()()
        with pytest.raises(ConfigError, match=r"^mtp: expected a mapping of the plugin's options"):
            config.mtp = None

    def test_unknown_names_are_the_hosts_to_refuse(self) -> None:
        with pytest.raises(ValidationError, match="max_draft_length"):
            decoding_config_class()(max_draft_length=3)

    def test_copies(self) -> None:
        config = decoding_config_class()(max_draft_len=2, mtp={"seed": 3})
        for made in (copy.copy(config), copy.deepcopy(config), config.model_copy()):
            assert made == config
            assert type(made) is type(config)

    def test_pickles_and_installs_the_plugin(self, installs: list[str]) -> None:
        config = decoding_config_class()(max_draft_len=2, mtp={"seed": 3})
        config.num_nextn_predict_layers = 2
        sent = pickle.dumps(config)
        assert installs == []
        received = pickle.loads(sent)
        assert installs == ["install"]
        assert ranks.loaded_by() == "config"
        assert received == config
        assert type(received) is type(config)
        assert received.spec_dec_mode == config.spec_dec_mode
        assert received.model_fields_set == config.model_fields_set


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("place", LINES, indirect=True)
class TestOverAHost:
    def test_it_is_the_hosts(self) -> None:
        from tensorrt_llm.llmapi import MTPDecodingConfig as HostConfig

        config = decoding_config_class()(max_draft_len=2)
        assert isinstance(config, HostConfig)
        assert config_module.MTPDecodingConfig is type(config)
        assert decoding_config_class() is type(config)


@pytest.mark.usefixtures("installs")
def test_private_attributes_travel(host: Put) -> None:
    host("1.3b")
    config = decoding_config_class()(num_nextn_predict_layers=1)
    config._use_shared_kv_cache = True
    assert pickle.loads(pickle.dumps(config))._use_shared_kv_cache


@pytest.mark.parametrize("line", ["1.2rc", "1.2"])
def test_two_values_of_k(line: str, host: Put) -> None:
    host(line)
    same = decoding_config_class()(max_draft_len=3, num_nextn_predict_layers=3)
    assert same.max_draft_len == 3
    with pytest.raises(ConfigError) as caught:
        decoding_config_class()(max_draft_len=3, num_nextn_predict_layers=2)
    assert str(caught.value) == (
        "max_draft_len: 3 contradicts num_nextn_predict_layers (its older name), which is 2; "
        "expected one of them, or the same in both"
    )


@pytest.mark.usefixtures("no_host")
def test_two_models_are_the_lines_to_have(host: Put) -> None:
    with pytest.raises(ConfigError, match=r"^mtp_eagle_one_model: expected true, got false$"):
        decoding_config_class()(mtp_eagle_one_model=False)
    host("1.2")
    assert decoding_config_class()(mtp_eagle_one_model=False).mtp_eagle_one_model is False


def test_another_decoding_type(host: Put) -> None:
    host("1.2rc")
    with pytest.raises(ConfigError, match=r"^decoding_type: expected 'MTP', got 'Eagle'$"):
        decoding_config_class()(decoding_type="Eagle")


@pytest.mark.usefixtures("no_host")
def test_alone_it_dumps_and_reads_itself() -> None:
    made = decoding_config_class()(max_draft_len=3)
    made.num_nextn_predict_layers = 2
    again = decoding_config_class()(**made.model_dump())
    assert again.max_draft_len == 3
    assert again.spec_dec_mode is made.spec_dec_mode is SpeculativeDecodingMode.MTP


@pytest.mark.usefixtures("no_host")
def test_without_a_host_it_has_what_the_host_reads() -> None:
    config = decoding_config_class()(max_draft_len=3)
    assert isinstance(config, ConfigWithoutHost)
    assert config.supports_backend("pytorch")
    assert not config.supports_backend("tensorrt")
    assert (config.tokens_per_gen_step, config.get_runtime_tokens_per_gen_step(1)) == (4, 2)
    assert config.is_linear_tree
    assert config.num_capture_layers == 0


def test_a_host_without_the_config(host: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    host("1.3b")
    from tensorrt_llm import llmapi

    monkeypatch.delattr(llmapi, "MTPDecodingConfig")
    with pytest.raises(ConfigError) as caught:
        decoding_config_class()
    assert str(caught.value) == (
        "tensorrt_llm.llmapi.MTPDecodingConfig: expected a pydantic model, got nothing"
    )


def test_a_host_that_does_not_import_says_why(host: Put, tmp_path: Path) -> None:
    host("1.3b")
    (tmp_path / "1.3b" / "tensorrt_llm" / "__init__.py").write_text("import not_there_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        decoding_config_class()


@pytest.mark.usefixtures("installs")
def test_sent_to_a_process_without_the_host(host: Put) -> None:
    host("1.3b")
    sent = pickle.dumps(decoding_config_class()(max_draft_len=2))
    host("1.3b", models=False)
    assert pickle.loads(sent).max_draft_len == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_module, "_host_class", lambda: None)
        with pytest.raises(ConfigError) as caught:
            pickle.loads(sent)
    assert str(caught.value) == (
        "MTPDecodingConfig: expected tensorrt_llm in both processes or in neither; it imports only "
        "where the config was made"
    )


_RECEIVE = """
import logging, pickle, sys
from importlib import import_module
assert not any(name.startswith("mtp_plugin") for name in sys.modules)
sent = bytes.fromhex({sent!r})
logging.basicConfig(level=logging.INFO, format="%(message)s")
config = None
class Late:  # the package exists by the time of the installation
    def find_spec(self, name, path=None, target=None):
        if name == "mtp_plugin.hosts.tensorrt_llm.config":
            package = sys.modules["mtp_plugin.hosts.tensorrt_llm"]
            package.install = lambda: print("installed")
            package.is_installed = lambda: False
sys.meta_path.insert(0, Late())
config = pickle.loads(sent)
again = pickle.loads(sent)
print(type(config).__name__, config.max_draft_len, config.mtp.seed)
"""


def test_a_fresh_process_is_reached_once(host: Put, tmp_path: Path) -> None:
    host("1.2")
    sent = pickle.dumps(decoding_config_class()(num_nextn_predict_layers=3, mtp={"seed": 7}))
    done = run_python(_RECEIVE.format(sent=sent.hex()), write_host(tmp_path / "rank", "1.2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["installed", "MTPDecodingConfig 3 7"]
    assert done.stderr.splitlines() == [
        "TensorRT-LLM: this process has the plugin, loaded by: config"
    ]
