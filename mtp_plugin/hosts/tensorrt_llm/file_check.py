"""``mtp-plugin doctor --host tensorrt_llm --config FILE``: whether the adapter serves a file.

The file is one for ``trtllm-serve``, for any number of GPUs. Nothing is loaded.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    host_keys,
)
from mtp_plugin.config.loading import read_yaml
from mtp_plugin.config.messages import got, spelled
from mtp_plugin.config.speculative import is_mtp
from mtp_plugin.errors import ConfigError, one_line, shell_quote
from mtp_plugin.hosts.tensorrt_llm.checks import OK, PROBLEM, examine, serve_command, show
from mtp_plugin.hosts.tensorrt_llm.config import ConfigWithoutHost, decoding_config_over
from mtp_plugin.hosts.tensorrt_llm.options import read_options
from mtp_plugin.hosts.tensorrt_llm.seams import PACKAGE, Need, look

OURS = {
    *("device", "fused_layers", "gpu_memory_utilization", "max_prompt_tokens_while_generating"),
    *("capture", "prompt_tokens", "seed"),
}
"""Keys of the embedded executor that TensorRT-LLM does not have."""
OPTIONS_FILE = (
    "TensorRT-LLM does not know it; write its keys to a file that TRTLLM_MTP_PLUGIN_CONFIG names"
)
OLDER = ("num_nextn_predict_layers", "BEGIN_THINKING_PHASE_TOKEN", "END_THINKING_PHASE_TOKEN")
KNOWN: Mapping[str, set[str]] = {
    "": {*LLMConfig.model_fields, *host_keys.TOP_LEVEL, "max_input_len"} - OURS,
    "kv_cache_config": {*KVCacheConfig.model_fields, *host_keys.KV_CACHE},
    "cuda_graph_config": {*CudaGraphConfig.model_fields, *host_keys.CUDA_GRAPHS} - OURS,
    "moe_config": set(host_keys.TOP_LEVEL["moe_config"].inside or ()),
    "speculative_config": {
        *MTPDecodingConfig.model_fields,
        *host_keys.SPECULATIVE_OF_TRTLLM,
        *OLDER,
        "num_nextn_predict_layers_from_model_config",
    },
}
"""Section -> keys of TensorRT-LLM 1.2 to 1.4; keys of other sections are not checked."""
SERVED: Mapping[str, Any] = {
    "sa_config": None,
    "use_sa_spec": False,
    "draft_skip_top_k_top_p": False,
}
"""Keys of ``speculative_config`` with the only value that the plugin serves."""


def unknown_keys(file: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each key that TensorRT-LLM does not have."""
    for section, known in KNOWN.items():
        inner = file if not section else file.get(section)
        if not isinstance(inner, Mapping) or (
            section == "speculative_config" and not is_mtp(inner)
        ):
            continue
        for key in map(spelled, inner):
            path = f"{section}.{key}" if section else key
            if path == "speculative_config.mtp":
                yield f"{path}: {OPTIONS_FILE}"
            elif key not in known:
                close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
                if section == "cuda_graph_config" and key in CudaGraphConfig.aliases:
                    close = [CudaGraphConfig.aliases[key]]
                hint = f"; did you mean {close[0]}?" if close else ""
                yield f"{path}: not a key of TensorRT-LLM 1.2 to 1.4{hint}"


def unserved_layout(file: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each way to use several GPUs that is refused when the model is built."""
    if file.get("enable_attention_dp") and file.get("enable_lm_head_tp_in_adp"):
        yield (
            "enable_lm_head_tp_in_adp: refused when the model is built, as it splits the draft "
            "head between the ranks; write false, which changes no output"
        )
    for name in ("pipeline", "context"):
        size = file.get(f"{name}_parallel_size", 1)
        if size not in (1, None):
            yield (
                f"{name}_parallel_size: {name} parallelism is refused when the model is built; "
                f"expected 1, got {got(size)}"
            )
    if file.get("guided_decoding_backend") is not None:
        yield "guided_decoding_backend: grammars are not served with drafts; leave it out"


def unserved_drafting(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield a problem for each option of MTP that is refused when the model is built."""
    for name, only in SERVED.items():
        if name in spec and spec[name] != only:
            yield (
                f"speculative_config.{name}: not served by mtp_plugin; expected {got(only)}, got "
                f"{got(spec[name])}"
            )
    fields = {*ConfigWithoutHost.model_fields, *OLDER} - {"decoding_type", "sa_config"}
    given = {name: value for name, value in spec.items() if name in fields}
    try:
        read_options(decoding_config_over(ConfigWithoutHost)(**given))
    except ValidationError as error:
        for each in error.errors(include_url=False):
            key = ".".join(("speculative_config", *map(str, each["loc"])))
            yield f"{key}: {each['msg']}, got {got(each['input'])}"
    except ConfigError as error:
        yield from (f"speculative_config: {line}" for line in str(error).splitlines())


def drafting_of(file: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return how a file drafts, and what is not served of it."""
    spec = file.get("speculative_config")
    if spec is None:
        return "no speculative_config: mtp_plugin is not used", []
    if not isinstance(spec, Mapping) or not is_mtp(spec):
        kind = spec.get("decoding_type") if isinstance(spec, Mapping) else spec
        return f"decoding_type {got(kind)}: TensorRT-LLM's own, mtp_plugin is not used", []
    if spec.get("use_dynamic_tree"):
        return "a tree: TensorRT-LLM's own, mtp_plugin is not used", []
    older, newer = spec.get("num_nextn_predict_layers"), spec.get("max_draft_len")
    draft_len = older if newer is None else newer
    problems = [*unserved_layout(file), *unserved_drafting(spec)]
    return f"MTP, K {'from the checkpoint' if draft_len is None else draft_len}", problems


def main(config: str) -> int:
    """Print what was found, the problems and the command to type next; return the exit code."""
    problems: list[str] = []
    try:
        file = read_yaml(Path(config), config, "a mapping of TensorRT-LLM's keys")
        drafting, unserved = drafting_of(file)
        problems = [*unknown_keys(file), *unserved]
        sys.stdout.write(f"drafts         {one_line(drafting)}\n")
    except ConfigError as error:
        problems = str(error).splitlines()
    for problem in problems:
        sys.stdout.write(f"problem: {one_line(problem)}\n")
    seen = examine() if look(Need(PACKAGE, "__name__")).holds else None
    if seen is None:
        sys.stdout.write(f"{PACKAGE}   not installed here: only the file was checked\n")
    else:
        show(seen, sys.stdout)
    if problems or (seen is not None and seen.problems):
        again = f"mtp-plugin doctor --host tensorrt_llm --config {shell_quote(config)}"
        sys.stdout.write(f"next: {one_line(again)}  # with this corrected\n")
        return PROBLEM
    sys.stdout.write(f"next: {one_line(serve_command(config=config))}\n")
    return OK
