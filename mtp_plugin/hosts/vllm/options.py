"""Options of the plugin in vLLM: ``additional_config["mtp_plugin"]``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mtp_plugin.config.messages import expected, got
from mtp_plugin.errors import ConfigError

KEY = "mtp_plugin"


class VllmOptions(BaseModel):
    """Options of one engine."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    verification: Literal["coupled"] = "coupled"
    """``coupled``: drafts and target tokens are sampled with the same noise, so that a seed gives
    the same output with any number of drafts."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """``auto``: Triton kernels on CUDA devices, else torch."""
    allow_untested: bool = False
    """Try a vLLM version that was not tested, if its methods have known signatures."""


def read_options(vllm_config: Any) -> VllmOptions | None:
    """Return the options of an engine; None if the plugin is off.

    Raises:
        ConfigError: lists every wrong option.
    """
    extra = getattr(vllm_config, "additional_config", None)
    given = extra.get(KEY) if isinstance(extra, dict) else None
    if given is None or given is False:
        return None
    if not isinstance(given, dict):
        raise ConfigError(
            f"additional_config.{KEY}: expected a mapping of options ({{}} for the defaults) or "
            f"false, got {got(given)}"
        )
    try:
        return VllmOptions.model_validate(given)
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(entry, given) for entry in error.errors())) from None


def _problem(entry: Any, given: dict[str, Any]) -> str:
    name = str(entry["loc"][0])
    field = VllmOptions.model_fields.get(name)
    if field is None:
        known = ", ".join(VllmOptions.model_fields)
        return f"additional_config.{KEY}.{name}: unknown option; known ones are {known}"
    wanted = expected(field.annotation, tuple(field.metadata))
    return f"additional_config.{KEY}.{name}: expected {wanted}, got {got(given[name])}"
