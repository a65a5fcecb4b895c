"""Every mistake in a config has one exact line: the file, the key, what came, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_plugin.config import (
    CudaGraphConfig,
    KVCacheConfig,
    LLMConfig,
    MTPDecodingConfig,
    MTPPluginOptions,
    OtherDecodingConfig,
    SpeculativeDecodingMode,
    load_config,
    parse_config,
)
from mtp_plugin.config.schema import ConfigModel
from mtp_plugin.errors import ConfigError, MTPPluginError
from tests.hostile import HOSTILE, is_short, suppress_short


class Case(NamedTuple):
    id: str
    yaml: str
    message: str


TOP_LEVEL_KEYS = (
    "model, dtype, device, max_batch_size, max_num_tokens, max_seq_len, kv_cache_config, "
    "gpu_memory_utilization, attn_backend, fused_layers, cuda_graph_config, "
    "disable_overlap_scheduler, enable_chunked_prefill, max_prompt_tokens_while_generating, "
    "seed, speculative_config"
)


def mtp(*lines: str) -> str:
    """A file whose only mistakes can be in these lines of its speculative_config."""
    return "model: m\nspeculative_config:\n  decoding_type: MTP\n  " + "\n  ".join(lines) + "\n"


FILE_CASES = [
    Case("empty file", "", "the file is empty; expected a mapping with the key 'model'"),
    Case(
        "only a comment",
        "# nothing\n",
        "the file is empty; expected a mapping with the key 'model'",
    ),
    Case("a list", "- model: m\n", "expected a mapping of keys to values, got a list"),
    Case("a word", "model\n", "expected a mapping of keys to values, got 'model'"),
    Case(
        "syntax",
        "model: m\nkv_cache_config: {tokens_per_block: 32\nmax_batch_size: 8\n",
        "line 3, column 15: while parsing a flow mapping: expected ',' or '}', but got ':'",
    ),
    Case(
        "tab",
        "model: m\nkv_cache_config:\n\ttokens_per_block: 32\n",
        "line 3, column 1: while scanning for the next token: "
        "found character '\\t' that cannot start any token",
    ),
    Case(
        "key twice",
        "model: m\nmax_batch_size: 8\nmax_batch_size: 4\n",
        "line 3, column 1: key 'max_batch_size' was already given on line 2",
    ),
    Case(
        "nested key twice",
        mtp("max_draft_len: 3", "use_mtp_vanilla: true", "max_draft_len: 3"),
        "line 6, column 3: key 'max_draft_len' was already given on line 4",
    ),
    Case(
        "two documents",
        "model: m\n---\nmodel: n\n",
        "line 2, column 1: expected a single document in the stream: but found another document",
    ),
    Case(
        "octal or decimal",
        "model: m\nmax_batch_size: 010\n",
        "line 2, column 17: expected a plain number, or quotes around a text, got 010, which "
        "versions of YAML read differently",
    ),
    Case(
        "octal with an underscore",
        "model: m\nmax_batch_size: -0_7\n",
        "line 2, column 17: expected a plain number, or quotes around a text, got -0_7, which "
        "versions of YAML read differently",
    ),
    Case(
        "base 60 or text",
        "model: 1:30\n",
        "line 1, column 8: expected a plain number, or quotes around a text, got 1:30, which "
        "versions of YAML read differently",
    ),
    Case(
        "base 60 with a fraction",
        "model: m\nkv_cache_config: {free_gpu_memory_fraction: 1:30.5}\n",
        "line 2, column 45: expected a plain number, or quotes around a text, got 1:30.5, which "
        "versions of YAML read differently",
    ),
    Case(
        "octal key",
        "model: m\n010: 1\n",
        "line 2, column 1: expected a plain number, or quotes around a text, got 010, which "
        "versions of YAML read differently",
    ),
    Case(
        "alias in its own sequence",
        "model: m\nspeculative_config: {decoding_type: other, x: &a [*a]}\n",
        "line 2, column 47: an alias is used inside its own anchor",
    ),
    Case(
        "alias in its own mapping",
        "model: m\nspeculative_config: &a {decoding_type: other, x: {y: *a}}\n",
        "line 2, column 21: an alias is used inside its own anchor",
    ),
    Case(
        "aliases that double",
        "model: m\nspeculative_config:\n  decoding_type: other\n  x0: &x0 [1, 1]\n"
        + "".join(f"  x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 60)),
        "line 19, column 8: expected at most 100000 values, aliases followed, got more",
    ),
    Case(
        "home of an unknown user",
        "model: ~nosuchuser/x\n",
        "model: expected the home of a user, got '~nosuchuser'",
    ),
    Case(
        "home of an unknown user for ids",
        "model: m\nspeculative_config: {decoding_type: MTP, mtp: {draft_vocab: ~nosuchuser/x}}\n",
        "speculative_config.mtp.draft_vocab: expected the home of a user, got '~nosuchuser'",
    ),
    Case(
        "python object",
        "model: !!python/name:os.system\n",
        "line 1, column 8: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/name:os.system'",
    ),
    Case(
        "control character",
        "model: \x07\n",
        "not valid YAML: unacceptable character #x0007: "
        'special characters are not allowed in "<unicode string>", position 7',
    ),
    Case(
        "no flag",
        'model: !!bool "x"\n',
        "not valid YAML: a value is not of its tag: KeyError: 'x'",
    ),
    Case(
        "no number",
        'model: !!int ""\n',
        "not valid YAML: a value is not of its tag: IndexError: string index out of range",
    ),
    Case(
        "no mapping",
        "!!map [a]\n",
        "not valid YAML: a value is not of its tag: TypeError: cannot unpack non-iterable "
        "ScalarNode object",
    ),
    Case(
        "a long old number",
        f"max_num_tokens: 0{'7' * 5000}\n",
        f"line 1, column 17: expected a plain number, or quotes around a text, got 0{'7' * 39}, "
        "which versions of YAML read differently",
    ),
    Case("impossible date", "model: 2026-13-45\n", "not valid YAML: month must be in 1..12"),
]

KEY_CASES = [
    Case(
        "no model",
        "max_batch_size: 8\n",
        "model: required key is missing; expected text that is not empty",
    ),
    Case(
        "typo",
        "model: m\nmax_batchsize: 8\n",
        "max_batchsize: unknown key; did you mean max_batch_size?",
    ),
    Case(
        "nothing alike",
        "model: m\nzebra: 8\n",
        f"zebra: unknown key; expected one of {TOP_LEVEL_KEYS}",
    ),
    Case(
        "key that is a number",
        "model: m\n8: 8\n",
        f"8: expected a key that is text; expected one of {TOP_LEVEL_KEYS}",
    ),
    Case(
        "overlap under its opposite name",
        "model: m\nenable_overlap_scheduler: true\n",
        "enable_overlap_scheduler: unknown key; "
        "write disable_overlap_scheduler with the opposite value",
    ),
    Case(
        "older graph key",
        "model: m\nuse_cuda_graph: true\n",
        "use_cuda_graph: unknown key; write cuda_graph_config: {} (graphs) or null (none)",
    ),
    Case(
        "another engine's block size",
        "model: m\nblock_size: 8\n",
        "block_size: unknown key; write kv_cache_config: {tokens_per_block: _}",
    ),
    Case(
        "two names of one key",
        "model: m\nmax_num_seqs: 8\nmax_batch_size: 4\n",
        "max_num_seqs: 8 is max_batch_size under another name, and max_batch_size: 4 is given as "
        "well",
    ),
    Case(
        "another engine's prefix caching",
        "model: m\nenable_prefix_caching: true\n",
        "enable_prefix_caching: KV blocks are not reused between requests; expected false or null, "
        "got true",
    ),
    Case(
        "two seeds of the engine",
        "model: m\nseed: 7\nspeculative_config:\n  decoding_type: MTP\n  mtp: {seed: 3}\n",
        "seed: 7 contradicts speculative_config.mtp.seed: 3; leave one out",
    ),
    Case(
        "seed of the engine below zero",
        "model: m\nseed: -7\n",
        "seed: expected an integer from 0 to 18446744073709551615 or null, got -7",
    ),
    Case(
        "another engine's method",
        "model: m\nspeculative_config:\n  method: ngram\n",
        "speculative_config.method: expected 'mtp', got 'ngram'",
    ),
    Case(
        "two shares of memory",
        "model: m\ngpu_memory_utilization: 0.5\nkv_cache_config:\n  "
        "free_gpu_memory_fraction: 0.5\n",
        "gpu_memory_utilization: expected either this or kv_cache_config.free_gpu_memory_fraction, "
        "got both",
    ),
    Case(
        "graphs and none",
        "model: m\nenforce_eager: true\ncuda_graph_config: {}\n",
        "enforce_eager: true contradicts cuda_graph_config; leave one of them out",
    ),
    Case(
        "another engine's K",
        mtp("num_draft_tokens: 3"),
        "speculative_config.num_draft_tokens: unknown key; write max_draft_len",
    ),
    Case(
        "upper-case thinking token",
        mtp("BEGIN_THINKING_PHASE_TOKEN: 7"),
        "speculative_config.BEGIN_THINKING_PHASE_TOKEN: unknown key; "
        "write begin_thinking_phase_token",
    ),
    Case(
        "TensorRT-LLM's rejection switch",
        mtp("use_rejection_sampling: true"),
        "speculative_config.use_rejection_sampling: unknown key; "
        "write mtp: {verification: rejection, draft_sampling: plain}",
    ),
    Case(
        "too far out",
        "model: m\nmax_draft_len: 3\n",
        "max_draft_len: unknown key; it belongs under speculative_config",
    ),
    Case(
        "one level too far out",
        mtp("draft_sampling: greedy"),
        "speculative_config.draft_sampling: unknown key; it belongs under speculative_config.mtp",
    ),
    Case(
        "too far in",
        mtp("max_seq_len: 128"),
        "speculative_config.max_seq_len: unknown key; it belongs at the top level",
    ),
    Case(
        "typo in a nested mapping",
        mtp("mtp: {kernel: triton}"),
        "speculative_config.mtp.kernel: unknown key; did you mean kernels?",
    ),
    Case(
        "key of several lines",
        'model: m\n"a\\nb": 1\n',
        f"'a\\nb': unknown key; expected one of {TOP_LEVEL_KEYS}",
    ),
    Case(
        "no decoding type",
        "model: m\nspeculative_config: {max_draft_len: 3}\n",
        "speculative_config.decoding_type: required key is missing; "
        "expected 'MTP' or the name of another plugin",
    ),
    Case(
        "total draft tokens that are not K",
        mtp("max_draft_len: 3", "max_total_draft_tokens: 4"),
        "speculative_config.max_total_draft_tokens: expected max_draft_len (3), as drafts are "
        "linear, or no such key, got 4",
    ),
    Case(
        "decoding type without a name",
        "model: m\nspeculative_config: {decoding_type: ''}\n",
        "speculative_config.decoding_type: expected text that is not empty, got ''",
    ),
]

TYPE_CASES = [
    Case("empty text", "model: ''\n", "model: expected text that is not empty, got ''"),
    Case("null model", "model:\n", "model: expected text that is not empty, got null"),
    Case(
        "text for an integer",
        "model: m\nmax_batch_size: '8'\n",
        "max_batch_size: expected an integer of at least 1, got '8'",
    ),
    Case(
        "fraction for an integer",
        "model: m\nmax_num_tokens: 2048.0\n",
        "max_num_tokens: expected an integer of at least 1, got 2048.0",
    ),
    Case(
        "switch for an integer",
        mtp("max_draft_len: true"),
        "speculative_config.max_draft_len: expected an integer from 1 to 16 or null, got true",
    ),
    Case(
        "integer for a switch",
        "model: m\nenable_chunked_prefill: 1\n",
        "enable_chunked_prefill: expected true or false, got 1",
    ),
    Case(
        "no drafts",
        mtp("max_draft_len: 0"),
        "speculative_config.max_draft_len: expected an integer from 1 to 16 or null, got 0",
    ),
    Case(
        "too many drafts",
        mtp("max_draft_len: 17"),
        "speculative_config.max_draft_len: expected an integer from 1 to 16 or null, got 17",
    ),
    Case(
        "too many drafts under the older name",
        mtp("num_nextn_predict_layers: 17"),
        "speculative_config.num_nextn_predict_layers: "
        "expected an integer from 1 to 16 or null, got 17",
    ),
    Case(
        "no such choice",
        mtp("mtp: {verification: exact}"),
        "speculative_config.mtp.verification: "
        "expected one of 'coupled', 'rejection', 'block', 'synthetic', got 'exact'",
    ),
    Case(
        "no such choice in a list",
        mtp("mtp: {verification: [coupled, synthetic]}"),
        "speculative_config.mtp.verification.1: "
        "expected one of 'coupled', 'rejection', 'block', got 'synthetic'",
    ),
    Case(
        "no choice at all",
        mtp("mtp: {verification: []}"),
        "speculative_config.mtp.verification: expected at least one, got a list without any",
    ),
    Case(
        "a choice twice",
        mtp("mtp: {verification: [coupled, block, block]}"),
        "speculative_config.mtp.verification: expected each at most once, got 'block' twice",
    ),
    Case(
        "word for rates",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: high}"),
        "speculative_config.mtp.synthetic_acceptance: expected a number from 0 to 1 or a list "
        "(each item a number from 0 to 1) or null, got 'high'",
    ),
    Case(
        "switch for a rate",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: true}"),
        "speculative_config.mtp.synthetic_acceptance: expected a number from 0 to 1 or a list "
        "(each item a number from 0 to 1) or null, got true",
    ),
    Case(
        "percent for a rate",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: 80}"),
        "speculative_config.mtp.synthetic_acceptance: expected a number from 0 to 1, got 80",
    ),
    Case(
        "percent among rates",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: [0.8, 60]}"),
        "speculative_config.mtp.synthetic_acceptance.1: expected a number from 0 to 1, got 60",
    ),
    Case(
        "seed below zero",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: 0.8, synthetic_seed: -1}"),
        "speculative_config.mtp.synthetic_seed: expected an integer from 0 to 4294967295, got -1",
    ),
    Case(
        "rates under an unknown name",
        mtp("mtp: {synthetic_acceptence: 0.8}"),
        "speculative_config.mtp.synthetic_acceptence: unknown key; "
        "did you mean synthetic_acceptance?",
    ),
    Case(
        "no such chain",
        mtp("mtp: {chain: inputs}"),
        "speculative_config.mtp.chain: "
        "expected one of 'output', 'target_shift', 'none' or null, got 'inputs'",
    ),
    Case(
        "word for a switch",
        "model: m\nfused_layers: maybe\n",
        "fused_layers: expected 'auto' or true or false, got 'maybe'",
    ),
    Case(
        "number for a switch",
        "model: m\nfused_layers: 1\n",
        "fused_layers: expected 'auto' or true or false, got 1",
    ),
    Case(
        "dtype",
        "model: m\ndtype: fp16\n",
        "dtype: expected one of 'auto', 'float32', 'bfloat16', 'float16', got 'fp16'",
    ),
    Case(
        "device with an index",
        "model: m\ndevice: cuda:1\n",
        "device: expected one of 'auto', 'cpu', 'cuda', got 'cuda:1'",
    ),
    Case(
        "fraction of zero",
        "model: m\nkv_cache_config: {free_gpu_memory_fraction: 0}\n",
        "kv_cache_config.free_gpu_memory_fraction: expected a number above 0, at most 1, got 0",
    ),
    Case(
        "not a number",
        mtp("use_relaxed_acceptance_for_thinking: true", "relaxed_delta: .nan"),
        "speculative_config.relaxed_delta: expected a number of at least 0, got nan",
    ),
    Case(
        "top-k of zero",
        mtp("use_relaxed_acceptance_for_thinking: true", "relaxed_topk: 0"),
        "speculative_config.relaxed_topk: expected an integer of at least 1, got 0",
    ),
    Case(
        "null for a mapping",
        "model: m\nkv_cache_config:\n",
        "kv_cache_config: expected a mapping, got null",
    ),
    Case(
        "word for a mapping",
        "model: m\nspeculative_config: MTP\n",
        "speculative_config: expected a mapping or null, got 'MTP'",
    ),
    Case(
        "mapping for a number",
        "model: m\nmax_seq_len: {max: 3}\n",
        "max_seq_len: expected an integer of at least 1 or null, got a mapping",
    ),
    Case(
        "number for a list",
        "model: m\ncuda_graph_config: {batch_sizes: 8}\n",
        "cuda_graph_config.batch_sizes: "
        "expected a list (each item an integer of at least 1) or null, got 8",
    ),
    Case(
        "item of a list",
        "model: m\ncuda_graph_config: {batch_sizes: [1, 0]}\n",
        "cuda_graph_config.batch_sizes.1: expected an integer of at least 1, got 0",
    ),
    Case(
        "list for a mapping",
        mtp("draft_len_schedule: [4, 3]"),
        "speculative_config.draft_len_schedule: expected a mapping (each key an integer of at "
        "least 1, each value an integer from 0 to 16) or null, got a list",
    ),
    Case(
        "key of the schedule",
        mtp("max_draft_len: 3", "draft_len_schedule: {0: 3}"),
        "speculative_config.draft_len_schedule.0: expected an integer of at least 1, got 0",
    ),
    Case(
        "value of the schedule",
        mtp("max_draft_len: 3", "draft_len_schedule: {4: 3, 8: -1}"),
        "speculative_config.draft_len_schedule.8: expected an integer from 0 to 16, got -1",
    ),
    Case(
        "no draft vocabulary",
        mtp("mtp: {draft_vocab: 0}"),
        "speculative_config.mtp.draft_vocab: expected an integer of at least 1, got 0",
    ),
    Case(
        "draft vocabulary without a name",
        mtp("mtp: {draft_vocab: ''}"),
        "speculative_config.mtp.draft_vocab: expected text that is not empty, got ''",
    ),
    *(
        Case(
            f"draft vocabulary by {name}",
            mtp(f"mtp: {{draft_vocab: {value}}}"),
            "speculative_config.mtp.draft_vocab: expected an integer of at least 1 or text that is "
            f"not empty or null, got {got}",
        )
        for name, value, got in (
            ("a list", "[1, 2]", "a list"),
            ("a switch", "true", "true"),
            ("a share", "0.5", "0.5"),
        )
    ),
    Case(
        "long text is cut",
        f"model: m\nmax_seq_len: {'x' * 200}\n",
        f"max_seq_len: expected an integer of at least 1 or null, got '{'x' * 76}...",
    ),
]

COMBINATION_CASES = [
    Case(
        "R44 both names of K",
        mtp("num_nextn_predict_layers: 3", "max_draft_len: 1"),
        "speculative_config.max_draft_len: 1 contradicts num_nextn_predict_layers "
        "(its older name), which is 3; expected max_draft_len alone",
    ),
    Case(
        "schedule begins with another K",
        mtp("max_draft_len: 3", "draft_len_schedule: {16: 1, 4: 2}"),
        "speculative_config.draft_len_schedule: expected the smallest batch size (4) to draft "
        "max_draft_len (3), got 2",
    ),
    Case(
        "schedule grows beyond K",
        mtp("max_draft_len: 3", "draft_len_schedule: {4: 3, 8: 4}"),
        "speculative_config.draft_len_schedule.8: expected at most max_draft_len (3), got 4",
    ),
    Case(
        "schedule without K",
        mtp("draft_len_schedule: {4: 3}"),
        "speculative_config.draft_len_schedule: expected max_draft_len with it, got null",
    ),
    Case(
        "empty schedule",
        mtp("max_draft_len: 3", "draft_len_schedule: {}"),
        "speculative_config.draft_len_schedule: "
        "expected at least one batch size, got an empty mapping",
    ),
    Case(
        "schedule and concurrency",
        mtp("max_draft_len: 3", "draft_len_schedule: {4: 3}", "max_concurrency: 4"),
        "speculative_config.draft_len_schedule: "
        "expected either draft_len_schedule or max_concurrency, got both",
    ),
    Case(
        "half a gate: window",
        mtp("acceptance_window: 100"),
        "speculative_config.acceptance_window: "
        "expected acceptance_length_threshold too: the gate needs both",
    ),
    Case(
        "half a gate: threshold",
        mtp("acceptance_length_threshold: 1.5"),
        "speculative_config.acceptance_length_threshold: "
        "expected acceptance_window too: the gate needs both",
    ),
    Case(
        "a gate under decoding without drafts",
        mtp("acceptance_window: 8", "acceptance_length_threshold: 1.0"),
        "speculative_config.acceptance_length_threshold: "
        "expected a number above 1, at most 17 or null, got 1.0",
    ),
    Case(
        "a gate that could never open again",
        mtp("max_draft_len: 1", "acceptance_window: 8", "acceptance_length_threshold: 1.95"),
        "speculative_config.acceptance_length_threshold: expected at most max_draft_len + 1 (2) "
        "with mtp.gate_margin (0.1) on top, or a closed gate could never open; got 1.95",
    ),
    Case(
        "gate options without a gate",
        mtp("mtp: {gate_margin: 0.2}"),
        "speculative_config.mtp.gate_margin: 0.2 would be ignored; expected acceptance_window and "
        "acceptance_length_threshold with it",
    ),
    Case(
        "probes at most sooner than at least",
        mtp(
            "acceptance_window: 8",
            "acceptance_length_threshold: 1.5",
            "mtp: {gate_max_probe_interval: 100}",
        ),
        "speculative_config.mtp.gate_max_probe_interval: "
        "expected at least gate_probe_interval (256), got 100",
    ),
    Case(
        "coupled verification of plain drafts",
        mtp("mtp: {draft_sampling: plain}"),
        "speculative_config.mtp.draft_sampling: 'plain' cannot be verified by 'coupled' "
        "verification; expected one of coupled, greedy",
    ),
    Case(
        "rejection of coupled drafts",
        mtp("mtp: {verification: rejection, draft_sampling: coupled}"),
        "speculative_config.mtp.draft_sampling: 'coupled' cannot be verified by 'rejection' "
        "verification; expected one of plain, greedy",
    ),
    Case(
        "block verification of coupled drafts",
        mtp("mtp: {verification: block, draft_sampling: coupled}"),
        "speculative_config.mtp.draft_sampling: 'coupled' cannot be verified by 'block' "
        "verification; expected one of plain, greedy",
    ),
    Case(
        "rejection and block of coupled drafts",
        mtp("mtp: {verification: [rejection, block], draft_sampling: coupled}"),
        "speculative_config.mtp.draft_sampling: 'coupled' cannot be verified by 'rejection', "
        "'block' verification; expected one of plain, greedy",
    ),
    Case(
        "synthetic verification of plain drafts",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: 0.8, draft_sampling: plain}"),
        "speculative_config.mtp.draft_sampling: 'plain' cannot be verified by 'synthetic' "
        "verification; expected one of coupled, greedy",
    ),
    Case(
        "synthetic verification without rates",
        mtp("mtp: {verification: synthetic}"),
        "speculative_config.mtp.synthetic_acceptance: expected a number from 0 to 1 or a list "
        "(each item a number from 0 to 1) with verification: synthetic, got null",
    ),
    Case(
        "rising rates",
        mtp("mtp: {verification: synthetic, synthetic_acceptance: [0.8, 0.6, 0.7]}"),
        "speculative_config.mtp.synthetic_acceptance.2: "
        "expected at most the rate before it (0.6), got 0.7",
    ),
    Case(
        "fewer rates than drafts",
        mtp("max_draft_len: 3", "mtp: {verification: synthetic, synthetic_acceptance: [0.8, 0.6]}"),
        "speculative_config.mtp.synthetic_acceptance: "
        "expected 3 rates, one per draft (max_draft_len), got 2",
    ),
    Case(
        "rates without synthetic verification",
        mtp("mtp: {synthetic_acceptance: 0.8}"),
        "speculative_config.mtp.synthetic_acceptance: 0.8 would be ignored; expected "
        "verification: synthetic with it",
    ),
    Case(
        "seed without synthetic verification",
        mtp("mtp: {synthetic_seed: 7}"),
        "speculative_config.mtp.synthetic_seed: 7 would be ignored; expected "
        "verification: synthetic with it",
    ),
    Case(
        "synthetic and relaxed",
        mtp(
            "use_relaxed_acceptance_for_thinking: true",
            "mtp: {verification: synthetic, synthetic_acceptance: 0.8}",
        ),
        "speculative_config.mtp.verification: 'synthetic' does not verify with the target; "
        "expected use_relaxed_acceptance_for_thinking: false with it",
    ),
    Case(
        "relaxed option while strict",
        mtp("relaxed_topk: 10"),
        "speculative_config.relaxed_topk: 10 would be ignored; expected "
        "use_relaxed_acceptance_for_thinking: true with it",
    ),
    *(
        Case(
            f"removed key {name}",
            mtp(f"mtp: {{{name}: null}}"),
            f"speculative_config.mtp.{name}: unknown key; it was removed; leave it out, and limit "
            "relaxed acceptance with relaxed_topk and relaxed_delta",
        )
        for name in ("relaxed_run_limit", "relaxed_entropy_scale")
    ),
    Case(
        "end of thinking without an id",
        mtp("mtp: {thinking_end: []}"),
        "speculative_config.mtp.thinking_end: expected 1 to 16 ids, got 0",
    ),
    Case(
        "end of thinking of no id",
        mtp("mtp: {thinking_end: [3, -1]}"),
        "speculative_config.mtp.thinking_end.1: expected an integer of at least 0, got -1",
    ),
    Case(
        "one id for both thinking tokens",
        mtp(
            "use_relaxed_acceptance_for_thinking: true",
            "begin_thinking_phase_token: 7",
            "end_thinking_phase_token: 7",
        ),
        "speculative_config.end_thinking_phase_token: "
        "must differ from begin_thinking_phase_token, both are 7",
    ),
    Case(
        "one text for both thinking tokens",
        mtp(
            "use_relaxed_acceptance_for_thinking: true",
            "mtp: {begin_thinking_phase: '|', end_thinking_phase: '|'}",
        ),
        "speculative_config.mtp.end_thinking_phase: "
        "must differ from begin_thinking_phase, both are '|'",
    ),
    Case(
        "thinking token by id and by text",
        mtp(
            "use_relaxed_acceptance_for_thinking: true",
            "end_thinking_phase_token: 7",
            "mtp: {end_thinking_phase: </think>}",
        ),
        "speculative_config.end_thinking_phase_token: "
        "expected either end_thinking_phase_token or mtp.end_thinking_phase, got both",
    ),
    Case(
        "vanilla's window with eagle",
        mtp("mtp: {draft_window: trtllm}"),
        "speculative_config.mtp.draft_window: 'trtllm' is for vanilla only; "
        "expected use_mtp_vanilla: true with it",
    ),
    Case(
        "vanilla's chain with eagle",
        mtp("mtp: {chain: target_shift}"),
        "speculative_config.mtp.chain: 'target_shift' is for vanilla only; "
        "expected use_mtp_vanilla: true with it",
    ),
    Case(
        "block reuse",
        "model: m\nkv_cache_config: {enable_block_reuse: true}\n",
        "kv_cache_config.enable_block_reuse: "
        "KV block reuse is not built yet; expected false, got true",
    ),
    Case(
        "too few tokens for the drafts",
        mtp("max_draft_len: 3") + "max_num_tokens: 31\n",
        "max_num_tokens: expected at least max_batch_size (8) times max_draft_len + 1 (4), "
        "which is 32, got 31",
    ),
    Case(
        "too few tokens for the batch",
        "model: m\nmax_batch_size: 16\nmax_num_tokens: 8\n",
        "max_num_tokens: expected at least max_batch_size (16), got 8",
    ),
    Case(
        "graph size twice",
        "model: m\ncuda_graph_config: {batch_sizes: [1, 4, 2, 4]}\n",
        "cuda_graph_config.batch_sizes: expected every size once, got 4 more than once",
    ),
    Case(
        "prompts in graphs without padding",
        "model: m\ncuda_graph_config: {prompt_tokens: [64]}\n",
        "cuda_graph_config.prompt_tokens: expected null or [] without enable_padding: true",
    ),
    Case(
        "no graph sizes",
        "model: m\ncuda_graph_config: {batch_sizes: []}\n",
        "cuda_graph_config.batch_sizes: expected at least one batch size, got an empty list",
    ),
    Case(
        "graph sizes given twice",
        "model: m\ncuda_graph_config: {batch_sizes: [1, 2], max_batch_size: 4}\n",
        "cuda_graph_config.batch_sizes: expected either batch_sizes or max_batch_size, got both",
    ),
    Case(
        "graph larger than any batch",
        "model: m\ncuda_graph_config: {batch_sizes: [16, 1]}\n",
        "cuda_graph_config.batch_sizes: expected at most max_batch_size (8), got 16",
    ),
    Case(
        "largest graph larger than any batch",
        "model: m\ncuda_graph_config: {max_batch_size: 16}\n",
        "cuda_graph_config.max_batch_size: expected at most max_batch_size (8), got 16",
    ),
    Case(
        "graphs without CUDA",
        "model: m\ndevice: cpu\ncuda_graph_config: {}\n",
        "cuda_graph_config: expected null with device: cpu",
    ),
]

CASES = [*FILE_CASES, *KEY_CASES, *TYPE_CASES, *COMBINATION_CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_message(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(case.yaml)
    with pytest.raises(ConfigError) as error:
        load_config("config.yaml")
    assert str(error.value) == f"config.yaml: {case.message}"


def test_case_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 30


def test_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == f"{path}: no such file; expected a YAML file"


def test_path_with_a_nul(tmp_path: Path) -> None:
    """Python's own words follow; they differ between its versions."""
    with pytest.raises(ConfigError) as error:
        load_config("a\0b")
    assert str(error.value).startswith("'a\\x00b': expected a path: ")
    path = tmp_path / "config.yaml"
    path.write_text('model: "a\\0b"\n')
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(f"{path}: model: expected a path, got 'a\\x00b': ")


def test_numbers_that_all_versions_of_yaml_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: '1:30'\nmax_batch_size: 0x10\nmax_num_tokens: 1_000\n"
        "kv_cache_config: {free_gpu_memory_fraction: 0.5, tokens_per_block: &a 8}\n"
    )
    config = load_config(path)
    assert (config.max_batch_size, config.max_num_tokens) == (16, 1000)
    assert config.kv_cache_config.free_gpu_memory_fraction == 0.5
    assert Path(config.model).name == "1:30"


def test_folder_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be read: Is a directory"


def test_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes("model: größe\n".encode("latin-1"))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f"{path}: expected UTF-8 text, got other bytes: "
        "'utf-8' codec can't decode byte 0xf6 in position 9: invalid start byte"
    )


def test_one_line_per_mistake() -> None:
    wrong = {
        "max_batchsize": 4,
        "kv_cache_config": {"tokens_per_block": 0},
        "speculative_config": {
            "decoding_type": "MTP",
            "max_draft_len": "3",
            "mtp": {"verification": "exact", "kernel": "auto"},
        },
    }
    with pytest.raises(ConfigError) as error:
        parse_config(wrong)
    assert sorted(str(error.value).splitlines()) == [
        "<mapping>: kv_cache_config.tokens_per_block: expected an integer of at least 1, got 0",
        "<mapping>: max_batchsize: unknown key; did you mean max_batch_size?",
        "<mapping>: model: required key is missing; expected text that is not empty",
        "<mapping>: speculative_config.max_draft_len: "
        "expected an integer from 1 to 16 or null, got '3'",
        "<mapping>: speculative_config.mtp.kernel: unknown key; did you mean kernels?",
        "<mapping>: speculative_config.mtp.verification: "
        "expected one of 'coupled', 'rejection', 'block', 'synthetic', got 'exact'",
    ]


def test_all_problems_come_in_one_error() -> None:
    """Unknown keys, wrong values and combinations of every section, whatever the others are."""
    mapping = {
        "max_batch_size": 0,
        "kv_cache_config": {"tokens_per_block": 0, "enable_block_reuse": True},
        "device": "cpu",
        "cuda_graph_config": {"enable_padding": 3, "batch_sizes": []},
        "max_num_tokens": 3,
        "speculative_config": {
            "decoding_type": "MTP",
            "num_nextn_predict_layers": "x",
            "max_draft_len": 3,
            "draft_len_schedule": {},
            "relaxed_topk": 2,
            "mtp": {"gate_margin": 0.2, "verification": "x", "synthetic_seed": 2, "seed": -1},
        },
        "nope": 1,
    }
    lines = message_of(lambda: parse_config(mapping)).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "model",
        "max_batch_size",
        "kv_cache_config.tokens_per_block",
        "kv_cache_config.enable_block_reuse",
        "cuda_graph_config.enable_padding",
        "cuda_graph_config.batch_sizes",
        "speculative_config.mtp.verification",
        "speculative_config.mtp.seed",
        "speculative_config.num_nextn_predict_layers",
        "speculative_config.draft_len_schedule",
        "speculative_config.relaxed_topk",
        "speculative_config.mtp.gate_margin",
        "nope",
        "cuda_graph_config",
    ]


@pytest.mark.parametrize("name", ["mtp", "Mtp", "MTP"])
def test_decoding_type_is_read_in_any_case(name: str) -> None:
    config = parse_config({"model": "m", "speculative_config": {"decoding_type": name}})
    assert config.speculative_config == MTPDecodingConfig()
    assert MTPDecodingConfig(decoding_type=name).decoding_type == "MTP"


@pytest.mark.parametrize("name", ["max_draft_len", "num_nextn_predict_layers"])
@pytest.mark.filterwarnings("ignore:num_nextn_predict_layers:DeprecationWarning")
def test_total_draft_tokens_equal_to_k_are_accepted(name: str) -> None:
    config = MTPDecodingConfig(**{name: 3, "max_total_draft_tokens": 3})
    assert config == MTPDecodingConfig(max_draft_len=3)


def test_one_line_per_impossible_combination() -> None:
    spec = {"decoding_type": "MTP", "relaxed_topk": 4, "relaxed_delta": 0.5}
    with pytest.raises(ConfigError) as error:
        parse_config({"model": "m", "speculative_config": spec}, source="job")
    ending = "would be ignored; expected use_relaxed_acceptance_for_thinking: true with it"
    assert str(error.value).splitlines() == [
        f"job: speculative_config.relaxed_topk: 4 {ending}",
        f"job: speculative_config.relaxed_delta: 0.5 {ending}",
    ]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            LLMConfig,
            {},
            "LLMConfig: model: required key is missing; expected text that is not empty",
        ),
        (
            KVCacheConfig,
            {"tokens_per_block": 0},
            "KVCacheConfig: tokens_per_block: expected an integer of at least 1, got 0",
        ),
        (
            CudaGraphConfig,
            {"batch_sizes": (0,)},
            "CudaGraphConfig: batch_sizes.0: expected an integer of at least 1, got 0",
        ),
        (
            MTPPluginOptions,
            {"keep_warm": None},
            "MTPPluginOptions: keep_warm: expected true or false, got null",
        ),
        (
            MTPDecodingConfig,
            {"num_nextn_predict_layers": 3, "max_draft_len": 1},
            "MTPDecodingConfig: max_draft_len: 1 contradicts num_nextn_predict_layers "
            "(its older name), which is 3; expected max_draft_len alone",
        ),
        (
            MTPDecodingConfig,
            {"verification": "block"},
            "MTPDecodingConfig: verification: unknown key; it belongs under speculative_config.mtp",
        ),
        (
            OtherDecodingConfig,
            {"decoding_type": 5},
            "OtherDecodingConfig: decoding_type: expected text that is not empty, got 5",
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_direct_construction(model: type, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        model(**options)
    assert str(error.value) == message
    assert isinstance(error.value, (ValueError, MTPPluginError))


SYNTHETIC = {"verification": "synthetic", "synthetic_acceptance": (0.8, 0.6)}
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a list for a config": (
        lambda: parse_config(["model"]),  # type: ignore[arg-type]
        "<mapping>: expected a mapping of keys to values, got a list",
    ),
    "text for the config of another plugin": (
        lambda: OtherDecodingConfig.model_validate("Toy"),
        "OtherDecodingConfig: expected a mapping, got 'Toy'",
    ),
    "R44: vanilla on a checkpoint with one layer": (
        lambda: MTPDecodingConfig(max_draft_len=3, use_mtp_vanilla=True).resolve(1),
        "max_draft_len: 3 is more than the checkpoint's 1 MTP layer, and vanilla needs one per "
        "draft; expected at most 1, or use_mtp_vanilla: false",
    ),
    "a checkpoint without MTP layers": (
        lambda: MTPDecodingConfig().resolve(0),
        "speculative_config: expected a checkpoint with MTP layers, got 0; null (--no-mtp on the "
        "command line) decodes without MTP",
    ),
    "K before resolution": (
        lambda: MTPDecodingConfig().draft_len,
        "max_draft_len: not known yet; expected a value in the config, or resolve() with the "
        "checkpoint's number of MTP layers first",
    ),
    "rates of two drafts for one": (
        lambda: MTPDecodingConfig(mtp=SYNTHETIC).resolve(1),
        "MTPDecodingConfig: mtp.synthetic_acceptance: expected 1 rate, one per draft "
        "(max_draft_len), got 2",
    ),
    "rates of no draft": (
        lambda: MTPDecodingConfig(mtp={**SYNTHETIC, "synthetic_acceptance": ()}).resolve(1),
        "MTPDecodingConfig: mtp.synthetic_acceptance: expected 1 rate, one per draft "
        "(max_draft_len), got 0",
    ),
    "shares of fewer drafts": (
        lambda: MTPPluginOptions(**SYNTHETIC).acceptance_shares(1),
        "synthetic_acceptance: expected 1 rate, one per draft (max_draft_len), got 2",
    ),
    "shares of more drafts": (
        lambda: MTPPluginOptions(**SYNTHETIC).acceptance_shares(3),
        "synthetic_acceptance: expected 3 rates, one per draft (max_draft_len), got 2",
    ),
    "shares without rates": (
        lambda: MTPPluginOptions().acceptance_shares(3),
        "synthetic_acceptance: expected 3 rates, one per draft (max_draft_len), got null",
    ),
    # a host that chooses MTPWorker itself may construct such a config
    "options of vanilla, once the mode is known": (
        lambda: MTPDecodingConfig(
            max_draft_len=3, mtp={"chain": "none", "draft_window": "trtllm"}
        ).resolve(3),
        "mtp.draft_window: 'trtllm' is for vanilla only; expected use_mtp_vanilla: true with it\n"
        "mtp.chain: 'none' is for vanilla only; expected use_mtp_vanilla: true with it",
    ),
    "a token budget, once K is known": (
        lambda: LLMConfig(
            model="m",
            max_num_tokens=16,
            speculative_config=MTPDecodingConfig(use_mtp_vanilla=True),
        ).resolve(3),
        "LLMConfig: max_num_tokens: expected at least max_batch_size (8) times "
        "max_draft_len + 1 (4), which is 32, got 16",
    ),
    "a mode of another name": (
        lambda: SpeculativeDecodingMode.from_string("ngram"),
        "speculative decoding mode: expected one of NONE, MTP, MTP_EAGLE_ONE_MODEL, got 'ngram'",
    ),
}


@pytest.mark.parametrize(("call", "message"), CALLS.values(), ids=CALLS)
def test_call_is_refused(call: Callable[[], object], message: str) -> None:
    assert message_of(call) == message


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
known_keys = st.sampled_from(
    [*LLMConfig.model_fields, *MTPDecodingConfig.model_fields, *MTPPluginOptions.model_fields]
)
calm = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@calm
@given(
    st.dictionaries(known_keys, yaml_values, max_size=4),
    st.dictionaries(known_keys, yaml_values, max_size=6),
)
def test_any_mapping_is_a_config_or_a_config_error(
    top: dict[str, object], spec: dict[str, object]
) -> None:
    wrong = {"model": "m", **top, "speculative_config": {"decoding_type": "MTP", **spec}}
    expected = message_of(lambda: parse_config(wrong))
    assert all(line.startswith("<mapping>: ") for line in expected.splitlines())


@calm
@given(st.text(max_size=200) | st.text(alphabet="model: {}[]\n-&*!|>'\"#,?1\t", max_size=60))
def test_any_text_is_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    expected = message_of(lambda: load_config(path))
    assert all(line.startswith(f"{path}: ") for line in expected.splitlines())


def message_of(call: Callable[[], object]) -> str:
    """What a `ConfigError` says; nothing where the call succeeds."""
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


# --- values that nothing means ---

SECTIONS: dict[tuple[str, ...], type[ConfigModel]] = {
    (): LLMConfig,
    ("kv_cache_config",): KVCacheConfig,
    ("cuda_graph_config",): CudaGraphConfig,
    ("speculative_config",): MTPDecodingConfig,
    ("speculative_config", "mtp"): MTPPluginOptions,
}


def holding(path: tuple[str, ...], key: Any, value: Any) -> dict[str, Any]:
    """A mapping for `parse_config` with a value somewhere in it."""
    top: dict[Any, Any] = {"model": "m", "speculative_config": {"decoding_type": "MTP"}}
    section = top
    for step in path:
        section = section.setdefault(step, {})
    section[key] = value
    return top


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_value_ends_in_another_error(value: Any) -> None:
    """Under any key each is taken, set aside, or refused in lines that can be read."""
    for path, section in SECTIONS.items():
        for key in (*section.model_fields, *section.host_keys, "nonsense"):
            with suppress_short(ConfigError):
                parse_config(holding(path, key, value))


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_key_ends_in_another_error(value: Any) -> None:
    if type(value).__hash__ is None:
        value = repr(type(value))
    for path in SECTIONS:
        with pytest.raises(ConfigError) as refused:
            parse_config(holding(path, value, 1))
        assert is_short(refused.value)


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_path_ends_in_another_error(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(value)
    assert is_short(refused.value)


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        (
            (),
            "max_batch_size",
            10**5000,
            "max_batch_size: expected an integer of at most 64 bits, got an integer of 16610 bits",
        ),
        (
            ("kv_cache_config",),
            "max_tokens",
            2**64,
            "kv_cache_config.max_tokens: expected an integer of at most 64 bits, got 18446744073",
        ),
        (
            ("cuda_graph_config",),
            "batch_sizes",
            [1] * 10**6,
            "cuda_graph_config.batch_sizes: expected at most 10000 items, got 1000000",
        ),
        (
            ("speculative_config", "mtp"),
            "verification",
            ["x"] * 10**6,
            "speculative_config.mtp.verification: expected at most 10000 items, got 1000000",
        ),
        (
            ("speculative_config",),
            "draft_len_schedule",
            dict.fromkeys(range(1, 10002), 1),
            "speculative_config.draft_len_schedule: expected at most 10000 items, got 10001",
        ),
    ],
    ids=["digits", "bits", "batch sizes", "verification", "schedule"],
)
def test_what_is_too_much(path: tuple[str, ...], key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(holding(path, key, value))
    assert str(refused.value).startswith(f"<mapping>: {message}")


def test_many_problems_are_cut() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({"model": "m", **{f"key{i}": 1 for i in range(150)}})
    lines = str(refused.value).splitlines()
    assert len(lines) == 101
    assert lines[-1] == "<mapping>: and more; only the first 100 problems are listed"


@pytest.mark.parametrize("name", ["config.yaml", "plugin.yaml"])
def test_a_device_without_an_end_is_no_config(tmp_path: Path, name: str) -> None:
    """A file may be a link to one."""
    (tmp_path / name).symlink_to("/dev/zero")
    (tmp_path / "good.yaml").write_text("model: m\nspeculative_config: {decoding_type: MTP}\n")
    wrong = str(tmp_path / name)
    given = (wrong, None) if name == "config.yaml" else (tmp_path / "good.yaml", wrong)
    with pytest.raises(ConfigError) as refused:
        load_config(given[0], plugin_options=given[1])
    assert str(refused.value) == (
        f"{wrong}: cannot be read: expected at most 67108864 bytes, got more"
    )
