"""What the flags of a launch line mean to vLLM and SGLang, for the adapters' own checks."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from mtp_plugin.checkpoint import DSPARK, SEPARATE_DRAFTERS, Checkpoint
from mtp_plugin.checkpoint.files import CONFIG_FILE, read_json
from mtp_plugin.errors import CheckpointError, ConfigError, format_value
from mtp_plugin.hosts.sglang import VARIABLE

Values = dict[str, Any]
"""Name of a flag, without dashes and with underscores -> its value."""
Names = Mapping[str, str]
DEFAULT_DRAFTS, MAX_DRAFTS = 3, 1024
MTP_LAYERS = "num_nextn_predict_layers"
UNKNOWN = {"model_type": "glm4_moe", MTP_LAYERS: 1, "vocab_size": 2**20}
"""Config of a model whose files are not here: it has MTP layers."""


@dataclass
class Findings:
    """What is said of a line."""

    drafts: str = ""
    missing: list[str] = field(default_factory=list)
    """What the command to type next adds."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Vllm:
    """``vllm serve``."""

    name, title, image, model_flag = "vllm", "vLLM", "vllm-openai", "model"
    module = "vllm.entrypoints.openai.api_server"
    aliases: ClassVar[Names] = {
        "tp": "tensor_parallel_size",
        "pp": "pipeline_parallel_size",
        "dp": "data_parallel_size",
        "dcp": "decode_context_parallel_size",
        "pcp": "prefill_context_parallel_size",
        "ep": "enable_expert_parallel",
        "sc": "speculative_config",
        "model_tag": "model",
    }
    unchecked = (
        *(
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ),
        *("enable_expert_parallel", "enable_eplb", "enable_dbo", "kv_cache_dtype"),
        *("kv_offloading_size", "config"),
    )
    """Flags with which no output was compared."""
    spec: ClassVar[Names] = {
        "spec_method": "method",
        "spec_model": "model",
        "spec_tokens": "num_speculative_tokens",
    }
    rewritten = ("speculative_config", *spec, "additional_config")
    """Flags that the command to type next has anew."""
    refused = ("return_sampling_mask", "enable_trace_replay", "enable_batch_sharded_sampling")

    def parser(self, words: list[str]) -> tuple[ArgumentParser, list[str]]:
        """Return the parser of the installed vLLM, and its words."""
        make: Any = None
        for place in ("launchers", "common", "openai"):  # by version
            with suppress(ImportError):
                make = import_module(f"vllm.entrypoints.{place}.cli_args").make_arg_parser
                break
        return make(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()), words

    def version_problem(self, version: str) -> str | None:
        """Return what to install instead of a version; None: it may be served."""
        from mtp_plugin.hosts.vllm.versions import OLDEST

        is_old = tuple(map(int, version.split(".")[:2])) < OLDEST
        return f"it needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer" if is_old else None

    def complete(
        self,
        values: Values,
        environment: Names,  # noqa: ARG002
        found: Findings,
    ) -> None:
        """Set what the line lacks, as vLLM resolves it and the plugin needs it.

        Raises:
            ConfigError: a value is no object of JSON.
        """
        given = _mapping(values, "speculative_config")
        spec = {str(key).replace("-", "_"): value for key, value in given.items()}
        spec |= {key: values.pop(name) for name, key in self.spec.items() if name in values}
        options = _mapping(values, "additional_config")
        if options.get("mtp_plugin") in (None, False):
            on = "--additional-config '{\"mtp_plugin\": {}}'"
            found.missing.append(f"the plugin is not turned on: {on}")
            options["mtp_plugin"] = {}
        if not spec and has_mtp_layers(values.get("model")):
            found.missing.append("drafts: --speculative-config, here for a model with MTP layers")
            spec["method"] = "mtp"
        if spec and _vllm_method(spec) == "mtp" and spec.get("num_speculative_tokens") is None:
            found.missing.append("num_speculative_tokens, the number of drafts a step")
            spec["num_speculative_tokens"] = DEFAULT_DRAFTS
        values |= {"speculative_config": spec, "additional_config": options}
        number = format_value(spec.get("num_speculative_tokens"))
        found.drafts = f"{_vllm_method(spec)}, K = {number}" if spec else "none"
        if "kv_transfer_config" in values:
            found.notes.append(
                "prefill and decode: in a split the plugin is needed where requests decode, K "
                "alike on both sides; where they prefill draft_len: auto does nothing, and without "
                "the plugin vLLM refuses min_p and logit_bias with drafts"
            )

    def problems(self, values: Values, environment: Names) -> Iterator[str]:
        """Yield what the adapter refuses, and vLLM itself where it is known."""
        from mtp_plugin.hosts.vllm.checks import plugins_problem
        from mtp_plugin.hosts.vllm.engine_checks import problems_of
        from mtp_plugin.hosts.vllm.options import DRAFTERS, drafter_config, read_settings
        from mtp_plugin.hosts.vllm.scheduled_draft_len import set_schedule

        yield from plugins_problem(environment)
        spec: Values = values["speculative_config"]
        method = _vllm_method(spec)
        drafts: Any = spec.get("num_speculative_tokens")
        if spec and (type(drafts) is not int or not 1 <= drafts <= MAX_DRAFTS):
            yield (
                f"speculative_config.num_speculative_tokens: expected 1 to {MAX_DRAFTS} drafts, "
                f"got {format_value(drafts)}"
            )
            return
        if spec and method in DRAFTERS and "model" not in spec:
            try:
                drafter_config(method)
            except ConfigError:
                yield f"speculative_config has no model: method {method} needs a draft model"
        model = config_of(values.get("model"))
        if method == "mtp" and model.get("model_type") in DSPARK:
            yield f"vLLM refuses method mtp for {model['model_type']}: set it to dspark"
        runner = environment.get("VLLM_USE_V2_MODEL_RUNNER", "1").strip().lower()
        defaults = {
            "draft_sample_method": "greedy",
            "synthetic_acceptance_rates": [],
            "num_speculative_tokens_per_batch_size": None,
            "draft_model_config": _as_model(config_of(spec.get("model"))),
            "use_multi_module_mtp": lambda: min(model.get(MTP_LAYERS) or 1, drafts) > 1,
        }
        switches = {name: values.get(name) for name in self.refused}
        config = SimpleNamespace(
            additional_config=values["additional_config"],
            speculative_config=SimpleNamespace(**{**defaults, **spec, "method": method})
            if spec
            else None,
            model_config=_as_model(
                model,
                runner_type="pooling" if values.get("runner") == "pooling" else "generate",
                **switches,
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=values.get("tensor_parallel_size", 1),
                data_parallel_size=values.get("data_parallel_size", 1),
                **switches,
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=values.get("max_num_seqs", 256)),
            watermark_config=values.get("watermark_config"),
            use_v2_model_runner=runner not in ("0", "false"),
        )
        settings = read_settings(config)
        if settings is not None:
            set_schedule(config)
            for problem in problems_of(config, settings, environment):
                if " cannot be used, vllm." not in problem:  # vLLM is not installed here
                    yield problem

    def removable(self, values: Values) -> Iterator[tuple[str, str]]:
        """Yield what may help if it is left out: (kind, name)."""
        for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_MTP_DRAFT_VOCAB", "VLLM_PLUGINS"):
            yield "variable", name
        kept = self.spec.values()
        yield from (("key", key) for key in values["speculative_config"] if key not in kept)
        yield from (("flag", name) for name in (*self.refused, "watermark_config"))


class Sglang:
    """``sglang serve``; see `Vllm`."""

    name, title, image, model_flag = "sglang", "SGLang", "lmsysorg/sglang", "model_path"
    module = "sglang.launch_server"
    aliases: ClassVar[Names] = {
        "model": "model_path",
        "dp": "dp_size",
        "pp": "pp_size",
        "ep": "ep_size",
        "speculative_algo": "speculative_algorithm",
        "pipeline_parallel_size": "pp_size",
        "data_parallel_size": "dp_size",
        "expert_parallel_size": "ep_size",
        "decode_context_parallel_size": "dcp_size",
        "attention_context_parallel_size": "attn_cp_size",
        "attention_data_parallel_size": "attn_dp_size",
        "speculative_draft_model": "speculative_draft_model_path",
    }
    unchecked = (
        *("speculative_draft_model_path", "enable_lora", "lora_paths", "enable_hierarchical_cache"),
        *("enable_deterministic_inference", "enable_multi_layer_eagle", "enable_eplb", "ep_size"),
        *("moe_a2a_backend", "kv_cache_dtype", "nnodes", "config"),
        *("dp_size", "enable_dp_attention", "attn_dp_size"),
    )
    steps = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    rewritten = ("speculative_algorithm", *steps)

    def parser(self, words: list[str]) -> tuple[ArgumentParser, list[str]]:
        """Return the parser of the installed SGLang, and its words."""
        parser = ArgumentParser()
        import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
        if words and not words[0].startswith("-"):
            words = ["--model-path", *words]
        if "--config" in words:
            merger = import_module("sglang.srt.server_args_config_parser").ConfigArgumentMerger
            words = merger(parser).merge_config_with_args(words)
        return parser, words

    def version_problem(self, version: str) -> str | None:
        """Return what to install instead of a version; None: it may be served."""
        from mtp_plugin.hosts.sglang.versions import SERVED

        return None if version in SERVED else f"it needs SGLang {' or '.join(SERVED)}"

    def complete(self, values: Values, environment: Names, found: Findings) -> None:
        """Set what the line lacks, as SGLang resolves it and the plugin needs it."""
        if not environment.get(VARIABLE, "").strip():
            found.missing.append(f"the plugin is not turned on: {VARIABLE}='{{}}'")
        steps, width, tokens = map(values.get, self.steps)
        if values.get("speculative_algorithm") is None:
            if not has_mtp_layers(values.get("model_path")):
                found.drafts = "none"
                return
            values["speculative_algorithm"] = "EAGLE"
            found.missing.append("drafts: four flags, here for a model with MTP layers")
        elif steps is None or width is None:
            absent = ", ".join(flag(name) for name in self.steps if values.get(name) is None)
            found.missing.append(
                f"{absent}: without all of them SGLang ends, or chooses several drafts a step for "
                "some models, which the plugin refuses"
            )
        algorithm = _sglang_algorithm(values)
        if algorithm in ("EAGLE", "EAGLE3"):
            if steps is None:
                steps = tokens - 1 if type(tokens) is int else DEFAULT_DRAFTS
            width = 1 if width is None else width
            if width == 1 and type(steps) is int:
                tokens = steps + 1  # as SGLang sets it
            values |= zip(self.steps, (steps, width, tokens), strict=True)
        found.drafts = f"{algorithm}, K = {format_value(steps)}"
        if values.get("disaggregation_mode", "null") != "null":
            found.notes.append(
                "prefill and decode: run it on both, with the same options and K; look for "
                "'mtp_plugin on' in both logs"
            )

    def problems(self, values: Values, environment: Names) -> Iterator[str]:
        """Yield what the adapter refuses."""
        from mtp_plugin.hosts.sglang.checks import plugins_problem
        from mtp_plugin.hosts.sglang.engine_checks import READ_FIELDS, problems_of
        from mtp_plugin.hosts.sglang.options import read_settings

        yield from plugins_problem(environment)
        given = {name: values.get(name) for name in (*READ_FIELDS, *self.steps)}
        given["speculative_algorithm"] = (
            _sglang_algorithm(values) if values.get("speculative_algorithm") else None
        )
        arguments = SimpleNamespace(**given)
        on = {**environment, VARIABLE: environment.get(VARIABLE, "").strip() or "{}"}
        yield from problems_of(arguments, read_settings(arguments, on), on)

    def removable(self, values: Values) -> Iterator[tuple[str, str]]:
        """Yield what may help if it is left out: (kind, name)."""
        from mtp_plugin.hosts.sglang.engine_checks import REFUSED_FIELDS, SIMULATION

        yield from (("variable", name) for name in (SIMULATION, "SGLANG_PLUGINS"))
        yield from (("flag", name) for name in REFUSED_FIELDS if name in values)


Engine = Vllm | Sglang
ENGINES: tuple[Engine, ...] = (Vllm(), Sglang())


def written(engine: Engine, values: Values) -> list[str]:
    """Return flags for what `complete` set."""
    given = ((name, values.get(name)) for name in engine.rewritten)
    return [
        word
        for name, value in given
        if value not in (None, {})
        for word in (flag(name), json.dumps(value) if isinstance(value, dict) else str(value))
    ]


def program_end(engine: Engine, words: Sequence[str], place: int) -> int | None:
    """Return the index of the first word after a program at ``place``; None: it is none."""
    word, after = words[place], words[place + 1 : place + 2]
    if (word.rpartition("/")[2], after) == (engine.name, ["serve"]):
        return place + 2
    if (word, after) == ("-m", [engine.module]):
        return place + 2
    is_entry = not any(map(re.compile("python3?|.*sglang|serve").fullmatch, after))
    return place + 1 if engine.image in word and is_entry else None


def config_of(model: object) -> dict[str, Any]:
    """Return the ``config.json`` of a folder; `UNKNOWN` for a model that is not here."""
    with suppress(CheckpointError):
        if is_folder(model):
            return read_json(Path(str(model)) / CONFIG_FILE)
    return dict(UNKNOWN)


def has_mtp_layers(model: object) -> bool:
    """Return whether the ``config.json`` of a model declares MTP layers; true if it is not here."""
    with suppress(CheckpointError):  # the checks of the checkpoint say it
        return Checkpoint(Path(), config_of(model), {}, ()).declared > 0
    return True


def is_folder(model: object) -> bool:
    """Return whether a model is a folder, not a name on the hub."""
    try:
        return isinstance(model, str) and Path(model).is_dir()
    except (OSError, ValueError):  # a name that is too long, or has bytes that no name has
        return False


def _as_model(config: Mapping[str, Any], **others: Any) -> Any:
    """Return what the checks read of vLLM's ``ModelConfig``."""
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    size = text.get("vocab_size", config.get("vocab_size"))
    names = config.get("architectures")
    return SimpleNamespace(
        get_vocab_size=lambda: size if type(size) is int and size > 0 else UNKNOWN["vocab_size"],
        try_get_generation_config=dict,
        hf_config=SimpleNamespace(**config),
        hf_text_config=SimpleNamespace(**text),
        architectures=[str(name) for name in names] if isinstance(names, list) else [],
        **others,
    )


def _mapping(values: Values, name: str) -> dict[str, Any]:
    given = values.get(name)
    if given is not None and not isinstance(given, dict):
        raise ConfigError(
            f"{flag(name)}: expected a JSON object in single quotes, got {format_value(given)}"
        )
    return dict(given or {})


def flag(name: str) -> str:
    """Return a flag as it is typed."""
    return f"--{name.replace('_', '-')}"


def _vllm_method(spec: Mapping[str, Any]) -> str:
    """Return the method as vLLM resolves it, as far as names say it."""
    method, model = spec.get("method"), spec.get("model")
    if method is not None:
        name = method if isinstance(method, str) else format_value(method)
        return "mtp" if name.endswith("_mtp") else name.strip("[]")
    kind = config_of(model).get("model_type")
    if isinstance(kind, str) and kind in SEPARATE_DRAFTERS:
        return SEPARATE_DRAFTERS[kind]
    parts = {"ngram": "ngram", "eagle-": "eagle", "eagle3": "eagle3"}
    parts |= {name: name for name in ("dflash", "dspark")}
    found = (name for part, name in parts.items() if part in str(model).lower())
    return next(found, "draft_model")


def _sglang_algorithm(values: Values) -> str:
    """Return the algorithm as SGLang resolves it."""
    algorithm, draft = (
        values.get(name) for name in ("speculative_algorithm", "speculative_draft_model_path")
    )
    algorithm = str(algorithm).upper()
    if algorithm not in ("EAGLE", "NEXTN"):
        return algorithm
    names = f"{draft} {config_of(draft).get('architectures')}"
    is_assistant = re.search(r"gemma-?4.*assistant", names, re.IGNORECASE)
    return "EAGLE" if draft is None or is_assistant is None else "FROZEN_KV_MTP"
