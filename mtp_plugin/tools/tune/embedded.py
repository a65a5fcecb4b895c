"""Embedded executors as the engines of ``tune``, one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams, StepEvent
from mtp_plugin.hosts.embedded.models import read_config
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.verification import label_of
from mtp_plugin.tools.check import make_prompts, reshaped, run_requests
from mtp_plugin.tools.tune.answer import BY_PROBABILITY, Answer, Setting, make_schedule
from mtp_plugin.tools.tune.engine import EngineFailedError, Request, StepClock, encode_prompts


class EmbeddedHost:
    """Starts executors with one model.

    Args:
        config: what all settings share, the other options of drafts included.
        num_drafts: the draft lengths; empty: that of the config.
        batch_size: the largest one.
        is_greedy: requests are greedy, and the config's verification method stays.

    Raises:
        ConfigError: there are no MTP layers to draft with, a draft length is not possible, or the
            config's outputs differ from those of K = 0 by design.
    """

    def __init__(
        self, config: LLMConfig, num_drafts: tuple[int, ...], batch_size: int, *, is_greedy: bool
    ) -> None:
        layers = read_config(config.model).facts.num_mtp_layers
        lengths = tuple(k for k in num_drafts if k)
        if not layers or (config.speculative_config is None and not lengths):
            raise ConfigError(
                "tune: expected MTP layers to draft with, got none; use a checkpoint with MTP "
                "layers and a config with speculative_config"
            )
        most = max(batch_size, config.max_batch_size)
        self._config = reshaped(config, k=max(lengths, default=None), batch=most).resolve(layers)
        speculative = self._config.speculative_config
        if not isinstance(speculative, MTPDecodingConfig):
            kind = None if speculative is None else speculative.decoding_type
            raise ConfigError(f"tune: expected drafts of MTP layers, got {kind}")
        label = label_of(DecodingOptions.read(speculative, defer_thinking_end=True))
        if label is not None:
            raise ConfigError(
                f"tune: {label.name} acceptance changes the text by design; expected a config with "
                "strict acceptance"
            )
        self.num_drafts = num_drafts or (0, speculative.draft_len)
        self._speculative = speculative
        self._is_greedy = is_greedy
        self._model: Any = None
        self._tokenizer: Any = None

    def start(self, setting: Setting, report: Callable[[str], None]) -> EmbeddedEngine:
        """Return an engine, which starts in `EmbeddedEngine.result`."""
        return EmbeddedEngine(self, setting, report)

    def open(self, setting: Setting, report: Callable[[str], None]) -> LLM:
        """Return an executor; the first one loads the MTP layers of all settings."""
        if self._model is None:
            config = self._config.model_copy(update={"cuda_graph_config": None})
            with LLM(config, on_progress=report) as llm:
                self._model, self._tokenizer = llm.model, llm.tokenizer
            del llm
        values = {**dict(self._config), **self._keys(setting)}
        config = self._config.model_validate(values)
        return LLM(config, model=self._model, tokenizer=self._tokenizer)

    def options(self, answer: Answer) -> dict[str, Any]:
        """Return the keys of a config file for an answer; K may depend on the batch size."""
        keys = self._keys(answer.setting, is_short=True)
        schedule = make_schedule({n: s.num_drafts for n, s in answer.by_batch_size.items()})
        # a schedule begins with the most drafts
        if len(schedule) > 1 and schedule[0][-1] == answer.setting.num_drafts:
            limits = {last: k for _, last, k in schedule[:-1]}
            last_k = schedule[-1][-1]
            if last_k:  # above the last limit there are no drafts
                limits[self._config.max_batch_size] = last_k
            keys["speculative_config"]["draft_len_schedule"] = limits
        return keys

    def _keys(self, setting: Setting, *, is_short: bool = False) -> dict[str, Any]:
        """Return the keys of the config that a setting decides.

        Args:
            is_short: leave out defaults, and methods that only share an engine.
        """
        if not setting.num_drafts:
            return {"speculative_config": None}
        speculative = self._speculative.model_dump(exclude_defaults=is_short)
        mtp = speculative.pop("mtp", {})
        is_shared = setting.method in BY_PROBABILITY and not is_short
        methods = BY_PROBABILITY if is_shared else (setting.method,)
        if not self._is_greedy and self._speculative.mtp.verifications != methods:
            mtp["verification"] = list(methods)
            if mtp.get("draft_sampling") != "greedy":  # which all methods verify
                mtp.pop("draft_sampling", None)
        if setting.draft_vocab is not None:
            mtp["draft_vocab"] = setting.draft_vocab
        chosen = {"decoding_type": "MTP", **speculative, "max_draft_len": setting.num_drafts}
        return {"speculative_config": chosen | ({"mtp": mtp} if mtp else {})}


@dataclass
class EmbeddedEngine:
    """One executor, with the interface of `EngineProcess`."""

    _host: EmbeddedHost
    _setting: Setting
    _report: Callable[[str], None]
    _llm: Any = None

    def result(self, _on_wait: Callable[[], None]) -> dict[str, Any]:
        """Start, and return what was started.

        Raises:
            EngineFailedError: there is not enough memory.
            MTPPluginError: the checkpoint or config cannot be run.
        """
        try:
            llm = self._llm = self._host.open(self._setting, self._report)
        except torch.OutOfMemoryError as error:
            raise EngineFailedError(str(error).partition("\n")[0]) from None
        dtype = next(llm.model.lm_head.parameters()).dtype
        return {
            "device": str(llm.device),
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": llm.config.max_batch_size,
        }

    def encode(self, prompts: list[Any]) -> list[list[int]]:
        """Return token ids; random ones without a tokenizer."""
        if self._llm.tokenizer is None:
            return make_prompts((), None, self._llm.model.facts.vocab_size, len(prompts), seed=0)
        return encode_prompts(self._llm.tokenizer, prompts)

    def run(self, requests: list[Request]) -> dict[str, Any]:
        """Run requests as one batch; see `mtp_plugin.tools.tune.engine.run_requests`."""
        clock = StepClock(len(requests))

        def on_step(events: list[tuple[int, StepEvent]]) -> None:
            clock.add(
                sum(bool(event.token_ids) for _, event in events),
                sum(event.finish_reason is not None for _, event in events),
            )

        if not requests:
            return {"tokens": [], "step_ms": [], "acceptance": []}
        params = [_params(options) for _, options in requests]
        made = self._llm.make_requests([prompt for prompt, _ in requests], params)
        try:
            ran = run_requests(self._llm, made, on_step)
        except torch.OutOfMemoryError as error:
            raise EngineFailedError(str(error).partition("\n")[0]) from None
        return {
            "tokens": [result.token_ids for result in ran.results],
            "step_ms": clock.step_ms,
            "acceptance": ran.acceptance.per_position,
        }

    def close(self) -> None:
        """Free the executor's memory."""
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None


def _params(options: dict[str, Any]) -> SamplingParams:
    options = dict(options)
    named = options.pop("extra_args", {})
    return SamplingParams(**options, verification=named.get("mtp_verification"), detokenize=False)
