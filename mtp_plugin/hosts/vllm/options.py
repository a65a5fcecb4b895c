"""Options of the plugin in vLLM: ``additional_config["mtp_plugin"]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from mtp_plugin.config.draft_vocab import add_draft_ids, resolve_draft_vocab
from mtp_plugin.config.messages import got, key_path, message_of
from mtp_plugin.config.values import DraftVocab
from mtp_plugin.errors import ConfigError
from mtp_plugin.speculative.rows.options import EngineSettings, RowOptions

KEY = "mtp_plugin"
DRAFTERS: Mapping[str, bool] = {
    "mtp": True,
    "draft_model": True,
    "eagle": True,
    "eagle3": True,
    "dspark": True,
    "dflash": False,
    "ngram": False,
    "ngram_gpu": False,
}
"""Methods of ``speculative_config`` that are served -> whether the probabilities of drafts can be
kept: DFlash samples all drafts of a request in one call, n-grams have no probabilities."""


class TailOptions(BaseModel):
    """A tail of copied text after the drafts of MTP layers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ngram: int = Field(ge=1, description="drafts of the tail")


class VllmOptions(RowOptions):
    """Options of one engine."""

    logger: ClassVar[str] = "vllm.mtp_plugin"
    option_prefix: ClassVar[str] = f"additional_config.{KEY}."
    synthetic_option: ClassVar[str] = "rejection_sample_method 'synthetic'"

    draft_vocab: DraftVocab | None = Field(
        default=None,
        description="token ids that may be drafted: this many of the lowest ones, or the path of "
        "a file of ids (JSON, an id or a range a line, .npy or SGLang's .pt); null: all; output "
        "does not change",
    )
    draft_len: Literal["auto"] | None = Field(
        default=None,
        description="auto: every step makes 0 to num_speculative_tokens drafts, the number with "
        "the most tokens per second by measured step times and acceptance; null: "
        "num_speculative_tokens; output does not change",
    )
    tail: TailOptions | None = Field(
        default=None,
        description="the last so many of num_speculative_tokens drafts are what followed the last "
        "tokens of a request, 6 or more, earlier in its own text; steps without a match leave them "
        "out; null: all drafts are of the MTP layers; output does not change",
    )

    @property
    def summary(self) -> dict[str, str]:
        """See `RowOptions.summary`."""
        return {
            **super().summary,
            "draft_len": self.draft_len or "fixed",
            "tail": str(self.tail.ngram if self.tail else 0),
            "draft_vocab": str(self.draft_vocab or "all"),
        }

    def no_draft_probs(self, drafter: str) -> str:
        """See `RowOptions.no_draft_probs`."""
        if not DRAFTERS.get(drafter, False):
            return (
                "needs the probabilities of drafts, which are not kept with "
                f"speculative_config.method {drafter!r}: use coupled"
            )
        return (
            "needs speculative_config.draft_sample_method 'probabilistic', with which the engine "
            "keeps the probabilities of drafts"
        )


VllmSettings: TypeAlias = EngineSettings[VllmOptions]


def drafter_config(text: str) -> dict[str, str]:
    """Return ``method`` and ``model`` of vLLM's ``speculative_config`` for ``NAME[,MODEL]``.

    Raises:
        ConfigError: an unknown drafter, or one that needs a draft model.
    """
    name, _, model = text.partition(",")
    if name not in DRAFTERS:
        raise ConfigError(f"drafter: expected one of {', '.join(DRAFTERS)}, got {name!r}")
    if name.startswith("ngram") and model:
        raise ConfigError(f"drafter: {name} has no draft model, got {model!r}: leave it out")
    if not name.startswith(("mtp", "dspark", "ngram")) and not model:
        raise ConfigError(f"drafter: {name} needs a draft model: {name},MODEL")
    return {"method": name, "model": model} if model else {"method": name}


def read_settings(vllm_config: Any) -> VllmSettings | None:
    """Return the settings of an engine; None if the plugin is off.

    Raises:
        ConfigError: lists every wrong option.
    """
    options = read_options(vllm_config)
    if options is None:
        return None
    spec = vllm_config.speculative_config
    if spec is None:
        return EngineSettings(options, 0)
    rates = None
    if getattr(spec, "rejection_sample_method", "standard") == "synthetic":
        rates = tuple(spec.synthetic_acceptance_rates)
    keeps = getattr(spec, "draft_sample_method", "greedy") == "probabilistic"
    keeps = keeps and DRAFTERS.get(spec.method, False)
    return EngineSettings(options, spec.num_speculative_tokens, keeps, rates, drafter=spec.method)


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
        raise ConfigError("; ".join(map(_problem, error.errors()))) from None


def draft_ids_of(vllm_config: Any, options: VllmOptions) -> tuple[Sequence[int], int] | None:
    """Return the token ids that may be drafted, and how many of them the option leaves out; None:
    all ids.

    Stop ids of the model and thinking tags are always among them.

    Raises:
        ConfigError: see `resolve_draft_vocab`.
    """
    model = vllm_config.model_config
    if options.draft_vocab is None:
        return None
    vocab = model.get_vocab_size()
    ids = resolve_draft_vocab(
        options.draft_vocab, vocab, key=f"additional_config.{KEY}.draft_vocab"
    )
    if ids is None:
        return None
    tags = (options.thinking_begin_token, options.thinking_end_token)
    always = [*_stop_ids(model), *(tag for tag in tags if tag is not None)]
    drafted = add_draft_ids(ids, always, vocab)
    return drafted, len(drafted) - len(ids)


def _stop_ids(model: Any) -> Iterator[int]:
    """Yield the ids that end an output, of the model's configuration and generation config."""
    given = [getattr(model.hf_config, "eos_token_id", None)]
    given.append(getattr(model.hf_text_config, "eos_token_id", None))
    given.append(model.try_get_generation_config().get("eos_token_id"))
    for ids in given:
        if ids is not None:
            yield from (ids,) if isinstance(ids, int) else ids


def _problem(details: ErrorDetails) -> str:
    name = key_path(details["loc"])
    if details["type"] == "extra_forbidden":
        if name in ("drafter", "decoding_type"):
            return (
                f"additional_config.{KEY}.{name}: registered drafters run in the embedded executor "
                f"alone: leave it out, and choose one of {', '.join(DRAFTERS)} with "
                "speculative_config.method"
            )
        fields = VllmOptions if len(details["loc"]) == 1 else TailOptions
        known = ", ".join(fields.model_fields)
        return f"additional_config.{KEY}.{name}: unknown option; known ones are {known}"
    return f"additional_config.{KEY}.{name}: {message_of(details)}"
