"""``generate``: runs, their comparison with the reference, and what is shown of both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

from rich import box
from rich.table import Table

from mtp_plugin.config import LLMConfig
from mtp_plugin.hosts.embedded import LLM, SamplingParams, StepEvent
from mtp_plugin.requests.pacing import paced
from mtp_plugin.speculative.metrics.acceptance import AcceptanceStats
from mtp_plugin.speculative.metrics.alarms import repeats_itself
from mtp_plugin.tools.check import (
    DRAFTS,
    LOGPROB,
    PROMPT_LOGPROB,
    TOKEN,
    BatchRun,
    Checked,
    Finding,
    KnownTexts,
    OnStep,
    Reference,
    check,
    document,
    make_prompts,
    merged,
    reshaped,
    run_requests,
    thinking_of,
)
from mtp_plugin.tools.terminal.console import DIFFERENT, OK, OutputConsole, can_show, progress
from mtp_plugin.tools.terminal.stream_view import StreamView

WARM_UP_TOKENS = 4
SHOWN = 10
"""Number of differences and of ties that are printed."""
BAD, WARNING = "bold red", "bold yellow"


@dataclass
class Generation:
    """Runs of ``generate`` on executors that share a model, and their results."""

    prompts: Sequence[Any]
    params: SamplingParams
    log: OutputConsole
    """Receives progress, and what is not compared."""
    stream: OutputConsole | None = None
    """Where outputs are streamed; None: nowhere."""
    num_prompts: int | None = None
    """The first prompts, and if there are fewer also random parts of them; None: all."""
    grid: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Arguments of `reshaped`, whose combinations are compared in one table; empty: one run."""
    marks: bool | None = None
    compare: bool = True
    compare_drafts: bool = False
    tie_ulps: float = 4.0
    checked: list[Checked] = field(default_factory=list)
    plain: BatchRun | None = None
    """The run without MTP for the speed, if there is no grid."""
    _model: Any = None
    _tokenizer: Any = None

    def run(self, settings: LLMConfig, choices: Sequence[str]) -> None:
        """Run and compare; ``choices`` are lines for the log once an engine exists."""
        every, names = product(*self.grid.values()), list(self.grid)
        configs = [reshaped(settings, **dict(zip(names, one, strict=True))) for one in every]
        found: dict[int, Checked] = {}
        # a model per dtype; the most drafts load the MTP layers for all
        for dtype in dict.fromkeys(config.dtype for config in configs):
            alike = [number for number, config in enumerate(configs) if config.dtype == dtype]
            self._model, known = None, KnownTexts()
            for number in sorted(alike, key=lambda number: -_draft_len(configs[number])):
                run, reference = self._decode(configs[number], () if found else choices)
                with progress(self.log) as show_progress:
                    found[number] = check(
                        replace(reference, known=known),
                        run,
                        outputs=self.compare,
                        drafts=self.compare_drafts,
                        report=show_progress,
                        note=self.log.write_line,
                    )
        self.checked = [found[number] for number in range(len(configs))]
        if not self.grid and self.compare and self.checked[0].run.acceptance.max_draft_len:
            self.plain = self._decode_without_mtp(settings)

    def _decode(self, settings: LLMConfig, choices: Sequence[str]) -> tuple[BatchRun, Reference]:
        params, view = self.params, None
        with progress(self.log) as report:
            llm = LLM(settings, model=self._model, tokenizer=self._tokenizer, on_progress=report)
        for choice in choices:
            self.log.write_line(choice)
        with llm:
            self._model, self._tokenizer, facts = llm.model, llm.tokenizer, llm.model.facts
            config, seed = settings.resolve(facts.num_mtp_layers), params.seed or 0
            if self.num_prompts is not None:
                given = (self.prompts, llm.tokenizer, facts.vocab_size, self.num_prompts)
                self.prompts, self.num_prompts = make_prompts(*given, seed), None
            if self.stream is not None and not self.grid:
                tags, shown = _tags_left_out(config, llm.tokenizer, params), self._texts()
                view = StreamView(self.stream, shown, marks=self.marks, left_out=tags)
            try:
                run = self._run(llm, params, "decoding", None if view is None else view.show)
            finally:
                if view is not None:
                    view.close()
            made_of = (llm.model, run.params, llm.max_seq_len, config, llm.tokenizer)
            return run, Reference(*made_of, self.tie_ulps)

    def _texts(self) -> list[str]:
        """Return the prompts as texts; token ids if there is no tokenizer."""
        if self._tokenizer is None:
            return list(map(str, self.prompts))
        decode = partial(self._tokenizer.decode, skip_special_tokens=False)
        return [each if isinstance(each, str) else decode(each) for each in self.prompts]

    def _decode_without_mtp(self, settings: LLMConfig) -> BatchRun | None:
        """Return the run; None: it cannot have all options."""
        config = settings.model_copy(update={"speculative_config": None})
        tags = [thinking_of(each, self._tokenizer) for each in (config, settings)]
        if self.params.thinking_token_budget is not None and tags[0] != tags[1]:
            why = "only speculative_config names the ids of thinking"
            self.log.write_line(f"not timed without MTP: {why}")
            return None
        # no spinner: its thread would disturb the measurement
        self.log.write_line("decoding without MTP, for the speed")
        params = replace(self.params.without_drafts(), logprobs_mode=None)
        with LLM(config, model=self._model, tokenizer=self._tokenizer) as llm:
            return self._run(llm, params, "decoding without MTP")

    def _run(
        self, llm: LLM, params: SamplingParams, what: str, show: OnStep | None = None
    ) -> BatchRun:
        """Decode the prompts as one batch, after a few untimed warm-up steps."""
        requests = llm.make_requests(self.prompts, [params] * len(self.prompts))
        self.log.write_line("warming up")  # which may compile kernels
        few = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        llm.generate(requests[0].get_tokens()[:WARM_UP_TOKENS], few)
        report, num_tokens = paced(self.log.write_line), 0

        def count(events: list[tuple[int, StepEvent]]) -> None:
            nonlocal num_tokens
            num_tokens += sum(len(event.token_ids) for _, event in events)
            report(f"{what}: {num_tokens} tokens")

        return run_requests(llm, requests, show or count)

    # --- what is shown ---

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if an output is not identical to the reference."""
        return OK if all(one.is_equal for one in self.checked) else DIFFERENT

    def show(self, console: OutputConsole) -> None:
        """Print notes, a table of the runs, what was found, and the verdict."""
        first, bad = self.checked[0].run, None if self.exit_code == OK else BAD
        label = first.acceptance.label
        compared = [one for one in self.checked if one.num_equal is not None]
        tokens = sum(one.run.num_tokens for one in compared)
        num_ties = sum(len(one.only(TOKEN, is_tie=True)) for one in compared)
        ties = f" up to {num_ties} rounding ties" if num_ties else ""
        console.write_line("")
        if label is not None:
            console.write_line(str(label), WARNING)
        if self.plain is not None and self.plain.tokens_per_second:
            gain = (
                f"{first.tokens_per_second / self.plain.tokens_per_second:.1f}x tokens per second"
            )
            if label is not None:
                gain += f", {label.name} acceptance"
            elif compared:
                gain += ", output NOT identical" if bad else f", identical output{ties}"
            console.write_line(gain, WARNING if label is not None else bad or "bold green")
        if any(repeats_itself(e.token_ids) for e in first.results if e.acceptance.num_drafted):
            console.write_line(
                "note: the output repeats itself, which drafts predict too well: other outputs "
                "gain less; try --temperature 0.8 --top-p 0.95 --seed 7",
                WARNING,
            )
        self._show_table(console)
        for one in self.checked:
            self._show_findings(console, one)
        if compared:
            is_mtp = any(one.run.acceptance.max_draft_len for one in compared)
            what = "decoding without MTP" if is_mtp else "target-only decoding"
            says = f"{'NO' if bad else f'yes{ties}'} ({tokens} tokens)"
            if label is not None:
                equal = sum(one.num_equal or 0 for one in compared)
                says = f"not promised by {label.name} acceptance; {equal} of {tokens} tokens agree "
                says += "up to the first difference of each prompt"
            console.write_line(f"identical to {what}: {says}", bad)

    def _show_table(self, console: OutputConsole) -> None:
        """Compare the runs. Tokens and steps are those of decoding: the first token of a prompt
        comes from the step that reads the prompt, which counts as neither."""
        rows = [(self._name(one), one.run) for one in self.checked]
        rows += [] if self.plain is None else [("without MTP", self.plain)]
        is_mtp = any(run.acceptance.max_draft_len for _, run in rows)
        style = box.SIMPLE_HEAD if can_show("─━", console.file) else box.ASCII
        table = Table("", box=style, show_edge=False, pad_edge=False)
        drafts = ("tokens/step", "drafts accepted")
        for name in ("tokens/s", "tokens", "steps", *(drafts if is_mtp else ())):
            table.add_column(name, justify="right")
        for name, run in rows:
            stats, speed = run.acceptance, f"{run.tokens_per_second:.1f}"
            rates = " / ".join(f"{share:.0%}" for share in stats.per_position)
            row = (name, speed, str(stats.emitted), str(stats.steps))
            table.add_row(*row, *((f"{stats.acceptance_length:.2f}", rates) if is_mtp else ()))
        console.print(table)
        console.write_line("")

    def _name(self, one: Checked) -> str:
        k = one.run.acceptance.max_draft_len
        if self.grid:
            return f"K={k} batch {one.config.max_batch_size} {one.dtype}"
        return "with MTP" if k else "without MTP"

    def _show_findings(self, console: OutputConsole, one: Checked) -> None:
        """Print differences, ties, and what drafts without the executor gave."""
        where = f"{self._name(one)}, " if self.grid else ""
        for is_tie, style in ((False, BAD), (True, "dim")):
            found = [each for each in one.found if each.is_tie is is_tie and one.is_promised]
            for each in found[:SHOWN]:
                says = self._spelled(each.token)
                if each.kind in (TOKEN, DRAFTS):
                    says += f", target-only decoding has {self._spelled(each.expected)}"
                says += f", {each.note}" if each.note else ""
                what = f"{'tie' if is_tie else 'difference'}: {where}prompt {each.prompt}"
                console.write_line(f"{what}, {each.kind} {each.position}: {says}", style)
            if len(found) > SHOWN:
                console.write_line(f"and {len(found) - SHOWN} further ones", style)
        if one.num_logprobs is not None:
            console.write_line(f"{where}{one.num_logprobs} log-probabilities compared", "dim")
        if again := _as_json_again(one):
            count, alike = again["num_prompts"], again["num_equal_texts"]
            lengths = [again[f"acceptance_length{which}"] for which in ("", "_of_executor")]
            which = "prompt 1" if count == 1 else f"prompts 1-{count}"
            console.write_line(
                f"{where}{which} without the executor: {alike} of {count} texts equal, "
                f"{lengths[0]:.2f} tokens per step (by the executor {lengths[1]:.2f})",
                BAD if one.only(DRAFTS) else "dim",
            )

    def _spelled(self, token: int | None) -> str:
        """Return a token's id and text; None is the end of the output."""
        if token is None or self._tokenizer is None:
            return "the end" if token is None else str(token)
        return f"{token} {self._tokenizer.decode([token], skip_special_tokens=False)!r}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        is_promised = all(e.num_equal is not None and e.is_promised for e in self.checked)
        ran = {
            "sampling_params": self.params.requested_options(),
            "tie_tolerance_ulps": self.tie_ulps,
        }
        results: list[Any] = [_as_json_of(one) for one in self.checked]
        if not self.grid:
            plain = None if self.plain is None else _as_json_run(self.plain)
            ran |= {**results[0], "run_without_mtp": plain}
            results = [
                {"prompt": prompt, **as_json(result)}
                for prompt, result in zip(self.prompts, self.checked[0].run.results, strict=True)
            ]
        identical = self.exit_code == OK if is_promised else None
        return document("generate", ran, identical, results)


def _draft_len(config: LLMConfig) -> int:
    return getattr(config.speculative_config, "max_draft_len", 0) or 0


def _tags_left_out(config: LLMConfig, tokenizer: Any, params: SamplingParams) -> set[int]:
    """Return the ids of thinking tags that have no text."""
    tags = thinking_of(config, tokenizer)
    if tags is None or tokenizer is None:
        return set()
    ids, skips = {tags.begin, tags.end[-1], tags.end_token}, params.skip_special_tokens
    return {
        each
        for each in ids
        if each is not None and not tokenizer.decode([each], skip_special_tokens=skips)
    }


def _as_json_of(one: Checked) -> dict[str, Any]:
    stats, different = one.run.acceptance, one.only(TOKEN)
    ties, prompts = one.only(TOKEN, is_tie=True), [e.prompt_token_ids for e in one.run.results]
    comparison = {
        "identical": not different,
        "expected_identical": one.is_promised,
        "num_tokens": one.run.num_tokens,
        "num_equal": one.num_equal,
        "num_ties": len(ties),
        "ties": as_json(ties),
        "differences": [
            {**as_json(each), "prompt_token_ids": prompts[each.prompt - 1]} for each in different
        ],
    }
    wrong = as_json(one.only(LOGPROB, PROMPT_LOGPROB))
    logprobs = {"num_values": one.num_logprobs, "differences": wrong}
    return {
        "config": one.config.model_dump(mode="json"),
        "device": one.device,
        "dtype": one.dtype,
        "max_draft_len": stats.max_draft_len,
        "label": as_json(stats.label),
        "run": _as_json_run(one.run),
        "comparison": None if one.num_equal is None else comparison,
        "logprobs": None if one.num_logprobs is None else logprobs,
        "without_executor": _as_json_again(one),
    }


def _as_json_run(run: BatchRun) -> dict[str, Any]:
    names = ("num_tokens", "num_steps", "seconds", "tokens_per_second", "acceptance")
    return {name: as_json(getattr(run, name)) for name in names}


def _as_json_again(one: Checked) -> dict[str, Any] | None:
    if one.again is None:
        return None
    pairs = list(zip(one.again, one.run.results, strict=False))
    return {
        "num_prompts": len(pairs),
        "num_equal_texts": sum(again.token_ids == ours.token_ids for again, ours in pairs),
        "acceptance_length": merged(one.again).acceptance_length,
        "acceptance_length_of_executor": merged([ours for _, ours in pairs]).acceptance_length,
        "num_ties": len(one.only(DRAFTS, is_tie=True)),
        "differences": as_json(one.only(DRAFTS)),
    }


def as_json(value: Any) -> Any:
    """Return a value in JSON: records as objects, None for a number that JSON lacks and for the
    acceptance of a run without drafts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, AcceptanceStats):
        names = ("acceptance_length", "per_position", "acceptance_rate", "steps", "emitted")
        found = {name: getattr(value, name) for name in names}
        found |= {"drafted": value.num_drafted, "steps_by_emitted_tokens": value.histogram}
        return {**found, "label": as_json(value.label)} if value.max_draft_len else None
    if is_dataclass(value):
        return {each.name: as_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Finding):
        return {name: as_json(each) for name, each in value._asdict().items()}
    if isinstance(value, dict):  # the log-probabilities of a position
        return [
            {"token_id": token, "logprob": as_json(one.logprob), "rank": one.rank}
            for token, one in value.items()
        ]
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    return value
