"""``doctor``: check whether a config and its checkpoint will run, without loading weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from mtp_plugin.checkpoint import describe, read_checkpoint
from mtp_plugin.checkpoint.files import listed
from mtp_plugin.config import LLMConfig, MTPDecodingConfig
from mtp_plugin.config.messages import spelled
from mtp_plugin.errors import MTPPluginError, RequestError, one_line, shell_quote
from mtp_plugin.hosts.embedded.attention import HeadShape, select_backend
from mtp_plugin.hosts.embedded.chat import render_chat
from mtp_plugin.hosts.embedded.kv_cache.sizing import (
    available_bytes,
    configured_blocks,
    format_bytes,
    num_kv_blocks,
    total_bytes,
)
from mtp_plugin.hosts.embedded.memory import check_requests, token_bytes
from mtp_plugin.hosts.embedded.models import (
    CheckedConfig,
    ModelFacts,
    Preflight,
    check_declared,
    family_of,
    preflight,
    read_config,
    read_tokenizer,
    unread_tokenizer,
)
from mtp_plugin.hosts.embedded.resolved_config import (
    ResolvedConfig,
    check_budget,
    check_graphs,
    resolve_device,
    resolve_dtype,
    resolve_max_seq_len,
)
from mtp_plugin.requests.tokenizer import encode
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.plugin import (
    DraftPlan,
    HostFacts,
    SpeculativePieces,
    SpeculativePlugin,
    build_pieces,
    find_plugin,
    make_plan,
)
from mtp_plugin.speculative.verification import label_of
from mtp_plugin.tools.terminal.console import DIFFERENT, OK, OutputConsole

T = TypeVar("T")

EXAMPLE = "Once upon a time"
SHOWN = ("warning", "MTP layers", "MTP tensors", "quantization", "head", "thinking tags")
"""What is said of a checkpoint's files."""

_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass
class Diagnosis:
    """Findings and problems."""

    findings: list[tuple[str, str]] = field(default_factory=list)
    """(name, value) pairs in the order of the examination."""
    problems: list[str] = field(default_factory=list)
    next_command: str | None = None
    """The command that the first problem with one names."""
    example: str | None = None
    """A prompt in the form that the model expects; None: there is no tokenizer."""

    @property
    def exit_code(self) -> int:
        """`OK` if there are no problems, else `DIFFERENT`."""
        return DIFFERENT if self.problems else OK

    def add(self, name: str, value: object) -> None:
        self.findings.append((name, str(value)))

    def attempt(self, check: Callable[[], T]) -> T | None:
        """Return the result of a check; if it raises, add the error to the problems."""
        try:
            return check()
        except MTPPluginError as error:
            self.add_problem(error)
            return None

    def add_problem(self, error: MTPPluginError) -> None:
        """Add the lines of an error's message."""
        self.problems += [p for p in str(error).splitlines() if p not in self.problems]
        self.next_command = self.next_command or error.next_command

    def next_step(self, arguments: str) -> str:
        """Return the command to type next, given the options of this one."""
        if self.problems:
            return self.next_command or f"mtp-plugin doctor {arguments}  # with this corrected"
        if self.example is not None:
            return f"mtp-plugin generate {arguments} --prompt {shell_quote(self.example)}"
        return f"mtp-plugin tune --host embedded {arguments}"  # its prompts are token ids

    def holds(self, check: Callable[[], object]) -> bool:
        """Run a check, add its problems, and return whether there were none."""
        before = len(self.problems)
        self.attempt(check)
        return len(self.problems) == before


def examine(config: LLMConfig) -> Diagnosis:
    """Check config, checkpoint files, tokenizer, device and the memory of requests."""
    found = Diagnosis()
    found.add("checkpoint", config.model)
    found.attempt(lambda: _examine_device(found, config))
    found.attempt(lambda: _examine_cache(found, config))
    checked = found.attempt(lambda: read_config(config.model))
    if checked is None:
        return found
    facts = checked.facts
    tokenizer = found.attempt(lambda: _examine_tokenizer(found, checked))
    _add_facts(found, facts)
    found.attempt(lambda: _add_checkpoint(found, config.model))
    if checked.unread:
        found.add("config keys", f"not read: {listed(checked.unread, 20)}")
    # some checks need K, whose default comes from the checkpoint
    if isinstance(config.speculative_config, MTPDecodingConfig) and not facts.num_mtp_layers:
        found.attempt(lambda: check_declared(config.model))
    config = found.attempt(lambda: config.resolve(facts.num_mtp_layers)) or config
    speculative: Any = config.speculative_config
    decoding_type = None if speculative is None else speculative.decoding_type
    plugin = found.attempt(lambda: find_plugin(decoding_type))
    plan = None
    if plugin is not None:
        plan = found.attempt(lambda: make_plan(plugin, speculative, facts.num_mtp_layers))
    if plan is not None:
        found.attempt(lambda: check_budget(config, plan))
    tensors = found.attempt(lambda: _examine_tensors(found, config, plan))
    limit = found.attempt(lambda: resolve_max_seq_len(config, facts.max_position_embeddings))
    if plugin is None or plan is None or limit is None:
        return found
    _add_costs(found, config, plan, limit)
    needs = None
    if tensors is not None:
        needs = found.attempt(lambda: _row_and_weights(config, plan, tensors))
    row, weights = needs or (0, 0)
    if needs is not None:
        found.attempt(lambda: _examine_memory(found, config, limit, row, weights))
    device = found.attempt(lambda: resolve_device(config.device))
    if device is None:
        return found
    resolved = ResolvedConfig(config, facts, plugin, plan, device, limit)
    if not found.holds(lambda: check_requests(resolved, token_bytes=row, weight_bytes=weights)):
        return found
    pieces = found.attempt(lambda: _build(plugin, config, plan, facts, limit, tokenizer))
    slots = getattr(getattr(pieces, "manager", None), "slot_manager", None)
    if slots is not None:
        found.add("slots", f"{slots.max_num_requests} and the sentinel")
    cut = getattr(pieces, "draft_vocab_ids", None)
    if cut is not None:
        found.add("draft vocabulary", f"{len(cut)} of {facts.vocab_size} ids")
    return found


def show_diagnosis(found: Diagnosis, console: OutputConsole, arguments: str) -> None:
    """Print the findings, the problems, and the command to type next.

    Args:
        arguments: options that name the config and the checkpoint.
    """
    width = max(len(name) for name, _ in found.findings)
    for name, value in found.findings:
        console.write(f"{name:{width}}  ", "dim")
        console.write_line(one_line(value))
    for problem in found.problems:
        console.write("problem: ", "bold red")
        console.write_line(one_line(problem))
    if not found.problems:
        console.write_line("no problems found", "green")
    console.write("next: ", "bold")
    console.write_line(one_line(found.next_step(arguments)))


def _examine_cache(found: Diagnosis, config: LLMConfig) -> None:
    cache = config.kv_cache_config
    configured, block = configured_blocks(cache), cache.tokens_per_block
    if configured is None:
        found.add("KV blocks", f"of {block} tokens, as many as memory holds")
    else:
        found.add("KV blocks", f"{configured} of {block} tokens")


def _add_facts(found: Diagnosis, facts: ModelFacts) -> None:
    traits = family_of(facts.model_type).traits
    architecture = spelled(facts.architecture or "no architecture named")
    found.add("family", f"{facts.model_type} ({architecture})")
    found.add(
        "draft head",
        f"concat {traits.concat}, target state {traits.target_state}, recycles {traits.recycle}, "
        f"chain {traits.chain}, head {traits.head}, position of the {traits.position}",
    )
    found.add("layers", f"{facts.num_hidden_layers} and {facts.num_mtp_layers} MTP")
    found.add(
        "width",
        f"hidden {facts.hidden_size}, vocabulary {facts.vocab_size}, stored in {facts.dtype}",
    )
    found.add("end tokens", ", ".join(map(str, facts.eos_token_ids)) or "none")


def _add_checkpoint(found: Diagnosis, model: str) -> None:
    for name, value in describe(read_checkpoint(model)):
        if name in SHOWN:
            found.add(name, value)


def _examine_device(found: Diagnosis, config: LLMConfig) -> None:
    device = resolve_device(config.device)
    found.add("device", device)
    check_graphs(config, device, lambda note: found.add("CUDA graphs", note))


def _examine_tokenizer(found: Diagnosis, checked: CheckedConfig) -> Any:
    tokenizer = read_tokenizer(checked)
    if tokenizer is not None:
        found.example = EXAMPLE
        messages = [{"role": "user", "content": EXAMPLE}]
        with suppress(RequestError):  # no chat template, or one that needs other messages
            found.example = render_chat(tokenizer, messages, add_generation_prompt=True)
        if encode(tokenizer, ""):  # it begins every prompt itself
            found.example = found.example.removeprefix(tokenizer.bos_token or "")
    found.add(
        "tokenizer",
        f"none: prompts must be token ids{unread_tokenizer(checked.directory)}"
        if tokenizer is None
        else f"{len(tokenizer)} tokens",
    )
    return tokenizer


def _examine_tensors(found: Diagnosis, config: LLMConfig, plan: DraftPlan | None) -> Preflight:
    checked = preflight(config.model, 0 if plan is None else plan.num_draft_layers)
    tensors = checked.stored.values()
    size = sum(_BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors)
    found.add("tensors", f"{len(checked.stored)} of {size / 2**20:.1f} MiB, complete")
    heads, device = HeadShape.of(checked.config), resolve_device(config.device)
    found.add("attention", select_backend(config.attn_backend, heads, device).name)
    return checked


def _row_and_weights(config: LLMConfig, plan: DraftPlan, checked: Preflight) -> tuple[int, int]:
    """Return the KV bytes per token and the bytes of the weights."""
    dtype = resolve_dtype(config.dtype, checked.facts.dtype, resolve_device(config.device))
    layers = checked.facts.num_hidden_layers + plan.num_draft_layers
    weights = sum(math.prod(tensor.shape) for tensor in checked.stored.values())
    return token_bytes(HeadShape.of(checked.config), dtype, layers), weights * dtype.itemsize


def _examine_memory(
    found: Diagnosis, config: LLMConfig, max_seq_len: int, row: int, weights: int
) -> None:
    """Add the size of the KV cache, given the bytes of the weights."""
    device = resolve_device(config.device)
    available = available_bytes(device)
    if available is not None:
        available = max(0, available - weights)
    blocks = num_kv_blocks(
        config,
        device,
        max_seq_len=max_seq_len,
        token_bytes=row,
        available=available,
        total=total_bytes(device),
    )
    size = format_bytes((blocks + 1) * config.kv_cache_config.tokens_per_block * row)
    share = "" if available is None else f" of {format_bytes(available)} available"
    found.add("KV cache", f"{blocks} blocks, {size}{share}")


def _add_costs(found: Diagnosis, config: LLMConfig, plan: DraftPlan, max_seq_len: int) -> None:
    if plan.max_draft_len:
        names = {0: "a drafter without MTP layers", 1: "1 MTP layer"}
        layers = names.get(plan.num_draft_layers, f"{plan.num_draft_layers} MTP layers")
        found.add("drafts per step", f"K = {plan.max_draft_len} by {layers}")
        speculative = config.speculative_config
        if isinstance(speculative, MTPDecodingConfig):
            planned = speculative.model_copy(update={"max_draft_len": plan.max_draft_len})
            label = label_of(DecodingOptions.read(planned, defer_thinking_end=True))
            if label is not None:
                found.add("acceptance", f"{label.name}, {label.settings}: {label.note}")
    else:
        found.add("drafts per step", "none")
    overlap = not config.disable_overlap_scheduler
    rows = plan.rows_to_reserve(0, in_flight=overlap)
    found.add(
        "KV rows per request",
        f"its tokens and up to {rows} for the next step{' (overlap)' if overlap else ''}, "
        f"at most {max_seq_len}",
    )


def _build(
    plugin: SpeculativePlugin,
    config: LLMConfig,
    plan: DraftPlan,
    facts: ModelFacts,
    max_seq_len: int,
    tokenizer: Any,
) -> SpeculativePieces:
    """Build the components on the CPU, which checks the config."""
    batch_size = config.max_batch_size
    host = HostFacts(
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        dtype=facts.dtype,
        device=torch.device("cpu"),
        max_batch_size=batch_size,
        max_num_sequences=2 * batch_size,
        max_seq_len=max_seq_len,
        chain=family_of(facts.model_type).traits.chain,
        encode=None if tokenizer is None else partial(encode, tokenizer, add_special_tokens=False),
        end_ids=facts.eos_token_ids,
    )
    return build_pieces(plugin, config.speculative_config, plan, host)
