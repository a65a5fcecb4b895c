"""`MTPDecodingConfig` for TensorRT-LLM's Python API: its own config with the plugin's options.

A subclass of the host's class if ``tensorrt_llm`` can be imported, so that the host's type checks
hold; else a model of its own with the fields of the newest API version. It is mutable because the
host assigns to it. Unpickling one installs the plugin, which is how ranks that receive only the
config get it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializationInfo,
    field_serializer,
    model_validator,
)
from typing_extensions import Self

from mtp_plugin.config import MTPPluginOptions, SpeculativeDecodingMode
from mtp_plugin.config.messages import got
from mtp_plugin.config.values import RelaxedTopK
from mtp_plugin.errors import ConfigError, expect
from mtp_plugin.hosts.tensorrt_llm import ranks

_logger = logging.getLogger("mtp_plugin")

_OLDER_K = "num_nextn_predict_layers"
_OLDER_LAYERS = "num_nextn_predict_layers_from_model_config"

_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "use_advanced_mtp_sampler": (False, True),
    "use_advanced_spec_dec_sampling": (False, True),
    "allow_advanced_sampling": (False, True),
    "mtp_eagle_one_model": (True,),
    "moe_backend": (None,),
    "spec_dec_variant": (1,),
}
"""Options of some API versions -> values that do not change what the plugin does."""

_TWO_NAMES = (
    ("begin_thinking_phase_token", "BEGIN_THINKING_PHASE_TOKEN"),
    ("end_thinking_phase_token", "END_THINKING_PHASE_TOKEN"),
    ("speculative_model", "speculative_model_dir"),
)
"""Fields whose name differs between API versions."""

if TYPE_CHECKING:
    MTPDecodingConfig: type[Any]


class ConfigWithoutHost(BaseModel):
    """Fields of the newest API version, for use without ``tensorrt_llm``.

    K is ``max_draft_len``. ``num_nextn_predict_layers`` given alone is K, too; assigned later it is
    the checkpoint's number of MTP layers, which decides the mode.
    """

    model_config = ConfigDict(extra="forbid")

    decoding_type: Literal["MTP"] = "MTP"
    max_draft_len: int | None = Field(default=None, ge=1)
    max_total_draft_tokens: int | None = None
    num_nextn_predict_layers: int | None = Field(default=None, ge=1)
    use_mtp_vanilla: bool = False
    use_relaxed_acceptance_for_thinking: bool = False
    relaxed_topk: RelaxedTopK = 1
    relaxed_delta: float = Field(default=0.0, ge=0)
    begin_thinking_phase_token: int = Field(default=128798, ge=0)
    end_thinking_phase_token: int = Field(default=128799, ge=0)
    max_concurrency: int | None = Field(default=None, ge=1)
    draft_len_schedule: dict[int, int] | None = None
    speculative_model: str | Path | None = None
    load_format: str | None = None
    moe_backend: str | None = None
    spec_dec_variant: int = Field(default=1, ge=1)
    acceptance_rate_window_size: int | None = Field(default=None, ge=0)
    acceptance_rate_threshold: float | None = Field(default=None, ge=0, le=1)
    use_rejection_sampling: bool = False
    advanced_sampling_mode: str = "full"
    enable_penalty: bool = False
    sa_config: None = None
    use_dynamic_tree: Literal[False] = False
    dynamic_tree_max_topK: None = None  # noqa: N815

    _layers: int | None = PrivateAttr(default=None)
    _allow_separate_draft_kv_cache: bool = PrivateAttr(default=True)
    _allow_greedy_draft_tokens: bool = PrivateAttr(default=True)
    _use_shared_kv_cache: bool = PrivateAttr(default=False)
    _translated_from_max_concurrency: bool = PrivateAttr(default=False)
    _max_batch_size: int | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _settle_draft_len(self) -> Self:
        if self.max_draft_len is None:
            self.max_draft_len = self.num_nextn_predict_layers
        elif self.num_nextn_predict_layers is not None:
            self._layers = self.num_nextn_predict_layers
        self.max_total_draft_tokens = self.max_draft_len
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == _OLDER_K and self.__pydantic_private__ is not None:
            self._layers = value

    @property
    def spec_dec_mode(self) -> SpeculativeDecodingMode:
        """Eagle if the checkpoint has one MTP layer (or their number is unknown), else vanilla."""
        if self.use_mtp_vanilla or (self._layers or 1) > 1:
            return SpeculativeDecodingMode.MTP
        return SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL

    @property
    def num_capture_layers(self) -> int:
        return 0

    @property
    def is_linear_tree(self) -> bool:
        return True

    @property
    def tokens_per_gen_step(self) -> int:
        return 1 + (self.max_total_draft_tokens or 0)

    def get_runtime_tokens_per_gen_step(self, runtime_draft_len: int) -> int:
        return 1 + runtime_draft_len

    def supports_backend(self, backend: str) -> bool:
        return backend == "pytorch"


def decoding_config_class() -> type[Any]:
    """Return the config class: derived from the host's if ``tensorrt_llm`` can be imported.

    Raises:
        ConfigError: the host's class is missing or is not a pydantic model.
    """
    return decoding_config_over(_host_class() or ConfigWithoutHost)


def __getattr__(name: str) -> Any:
    if name == "MTPDecodingConfig":
        return decoding_config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _host_class() -> type[BaseModel] | None:
    try:
        import_module("tensorrt_llm")
    except ModuleNotFoundError as error:
        if error.name != "tensorrt_llm":
            raise
        return None
    found = getattr(import_module("tensorrt_llm.llmapi"), "MTPDecodingConfig", None)
    if isinstance(found, type) and issubclass(found, BaseModel):
        return found
    raise ConfigError(
        "tensorrt_llm.llmapi.MTPDecodingConfig: expected a pydantic model, got "
        f"{'nothing' if found is None else repr(found)}"
    )


@functools.lru_cache(maxsize=8)
def decoding_config_over(host: type[BaseModel]) -> type[BaseModel]:
    """Create the config class derived from ``host``."""

    class MTPDecodingConfig(host):  # type: ignore[misc, valid-type]
        """TensorRT-LLM's MTP config with the plugin's options under ``mtp``."""

        mtp: MTPPluginOptions = Field(
            default_factory=MTPPluginOptions,
            description="options that TensorRT-LLM does not have",
        )

        def __init__(self, /, **data: Any) -> None:
            given, layers = _as_host_reads(host, data)
            super().__init__(**given)
            if layers is not None:
                self.num_nextn_predict_layers = layers

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, _as_options(value) if name == "mtp" else value)

        @field_serializer("mtp")
        def _only_given(self, mtp: MTPPluginOptions, info: SerializationInfo) -> dict[str, Any]:
            """Keep the difference between given options and defaults in a serialized config."""
            return mtp.model_dump(mode=info.mode, exclude_unset=True)

        def __reduce__(self) -> tuple[Any, ...]:
            return _unpickled, (host is ConfigWithoutHost, self.__getstate__())

    MTPDecodingConfig.__module__ = __name__
    MTPDecodingConfig.__qualname__ = MTPDecodingConfig.__name__
    return MTPDecodingConfig


def _unpickled(alone: bool, state: dict[Any, Any]) -> Any:
    """Install the plugin in the receiving process and return the unpickled config.

    Raises:
        ConfigError: ``tensorrt_llm`` can be imported in only one of the two processes.
    """
    ranks.install_once("config")
    host = _host_class()
    expect(
        alone is (host is None),
        ConfigError,
        "MTPDecodingConfig: expected tensorrt_llm in both processes or in neither; it imports "
        f"{'only here' if alone else 'only where the config was made'}",
    )
    model = decoding_config_over(host or ConfigWithoutHost)
    config = model.__new__(model)
    config.__setstate__(state)
    return config


def _as_options(value: Any) -> MTPPluginOptions:
    if isinstance(value, MTPPluginOptions):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"mtp: expected a mapping of the plugin's options, got {got(value)}")
    return MTPPluginOptions.model_validate(value, context={"source": "mtp"})


def _as_host_reads(
    host: type[BaseModel], data: Mapping[str, Any]
) -> tuple[dict[str, Any], int | None]:
    """Return the options under the host's names, and the checkpoint's number of MTP layers.

    Raises:
        ConfigError: an option of another API version has a value that the plugin does not serve.
    """
    given, known = dict(data), _names(host)
    if "mtp" in given:
        given["mtp"] = _as_options(given["mtp"])
    if "decoding_type" not in known and "decoding_type" in given:
        kind = given.pop("decoding_type")
        expect(kind == "MTP", ConfigError, f"decoding_type: expected 'MTP', got {got(kind)}")
    for name, values in _WITHOUT_EFFECT.items():
        if name in given and name not in known:
            value = given.pop(name)
            expect(
                any(type(value) is type(each) and value == each for each in values),
                ConfigError,
                f"{name}: expected {' or '.join(map(got, values))}, got {got(value)}",
            )
            _logger.info("MTPDecodingConfig: %s has no effect and is ignored", name)
    for names in _TWO_NAMES:
        for name, other in (names, names[::-1]):
            if name in given and name not in known and other in known:
                given[other] = given.pop(name)
    layers = None if _OLDER_LAYERS in known else given.pop(_OLDER_LAYERS, None)
    _settle_names_of_k(host, given)
    return given, layers


def _settle_names_of_k(host: type[BaseModel], given: dict[str, Any]) -> None:
    """Set K under both names if the API version reads the older one."""
    field = host.model_fields.get(_OLDER_K)
    if field is None or field.default is None:
        return
    older, newer = given.get(_OLDER_K), given.get("max_draft_len")
    if older is not None and newer is not None and older != newer:
        raise ConfigError(
            f"max_draft_len: {got(newer)} contradicts {_OLDER_K} (its older name), which is "
            f"{got(older)}; expected one of them, or the same in both"
        )
    if newer is not None:
        given[_OLDER_K] = newer
    elif older is not None and "max_draft_len" in host.model_fields:
        given["max_draft_len"] = older


def _names(host: type[BaseModel]) -> set[str]:
    """Return the field names and aliases of a class."""
    names = set(host.model_fields)
    for field in host.model_fields.values():
        alias = field.validation_alias or field.alias
        if isinstance(alias, str):
            names.add(alias)
        elif alias is not None:
            names.update(each for each in getattr(alias, "choices", ()) if isinstance(each, str))
    return names
