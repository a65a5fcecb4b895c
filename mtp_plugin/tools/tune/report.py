"""The table of measured settings, and the options to paste into ``vllm serve`` or a config."""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import yaml

from mtp_plugin.tools.terminal.console import DIFFERENT, OK, OutputConsole
from mtp_plugin.tools.tune.answer import (
    BY_PROBABILITY,
    TOLERANCE,
    Answer,
    Measurement,
    find_answer,
    find_off,
    plugin_gain,
    unexplained_gains,
)
from mtp_plugin.tools.tune.run import Tuning

COLUMNS = ("batch", "step ms", "tokens/s", "of best", "tokens/step", "by position", "setting")


@dataclass(frozen=True)
class TuneReport:
    """The report of finished measurements."""

    tuning: Tuning
    source: str
    """Of the prompts."""

    @cached_property
    def answer(self) -> Answer | None:
        """What to use; None: there are no numbers for K = 0."""
        return find_answer(self.tuning.measurements)

    @property
    def exit_code(self) -> int:
        """`DIFFERENT` if a setting has no numbers."""
        return DIFFERENT if any(found.problem for found in self.tuning.measurements) else OK

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        options, answer = self.tuning.options, self.answer
        settings = [
            {
                **asdict(found),
                "acceptance_length": found.acceptance_length,
                "unexplained_gains": self._unexplained(found),
                "tokens_per_second": {n: found.tokens_per_second(n) for n in found.step_ms},
            }
            for found in self.tuning.measurements
        ]
        return {
            **self.tuning.facts,
            "prompts": f"{len(options.prompts)} of {self.source}",
            "sampling": dict(options.sampling),
            "max_new_tokens": options.max_new_tokens,
            "settings": settings,
            "not_measured": {str(each): why for each, why in self.tuning.skipped.items()},
            "plugin_gain": None if answer is None else self._plugin_gain(answer),
            "answer": answer and {**asdict(answer), "options": self._options(answer)},
        }

    def show(self, out: OutputConsole) -> None:
        """Print the table, the comparison of outputs, and the answer."""
        options = self.tuning.options
        traffic = ", ".join(f"{name} {value:g}" for name, value in options.sampling.items())
        facts = self.tuning.facts
        engine = "embedded executor" if options.embedded else f"vLLM {facts.get('vllm')}"
        where = "{dtype} on {device}".format(**facts) if facts else ""
        out.write_line(f"{engine}, {where}" if facts else "vLLM did not start")
        out.write_line(
            f"{len(options.prompts)} prompts of {self.source}, {traffic or 'greedy'}, at most "
            f"{options.max_new_tokens} tokens each"
        )
        rows = [COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for *numbers, setting in rows:
            cells = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)]
            out.write_line("  ".join([*cells, setting]))
        for found in self.tuning.measurements:
            if found.problem is not None:
                out.write_line(f"no numbers for {found.setting}: {found.problem}", "bold red")
            elif found.setting.num_drafts and found.setting.has_plugin:
                ties = f"; ties: {'; '.join(found.ties)}" if found.ties else ""
                kind = "greedy outputs" if found.setting.method in BY_PROBABILITY else "outputs"
                counts = f"{found.num_equal} of {found.num_outputs}"
                out.write_line(f"{found.setting}: {kind} identical to K = 0: {counts}{ties}")
        for found in self.tuning.measurements:
            if gains := self._unexplained(found):
                size, gain = max(gains.items(), key=lambda each: each[1])
                out.write_line(
                    f"* {found.setting}: not recommended, {gain:.2f} times as fast as K = 0 at "
                    f"batch {size}, more than its {found.acceptance_length:.2f} tokens per step "
                    "explain: was the machine busy? measure again on an idle one",
                    "bold red",
                )
        for left_out, why in self.tuning.skipped.items():
            out.write_line(f"{left_out}: not measured, {why}")
        if self.tuning.options.at_once == 1:
            out.write_line(
                "engines ran one after the other, so that another load of the machine counts as a "
                "difference; --at-once N measures N of them in turns, if they fit on the device"
            )
        self._show_answer(out)

    def _options(self, answer: Answer) -> dict[str, Any]:
        """Return the options of ``vllm serve``, or the keys of the embedded executor's config."""
        embedded = self.tuning.options.embedded
        return answer.options() if embedded is None else embedded.options(answer)

    def _plugin_gain(self, answer: Answer) -> dict[int, float]:
        return plugin_gain(answer, self.tuning.measurements)

    def _unexplained(self, found: Measurement) -> dict[int, float]:
        off = find_off(self.tuning.measurements)
        return {} if off is None else unexplained_gains(found, off)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        valid = [found for found in self.tuning.measurements if found.problem is None]
        valid.sort(key=lambda found: found.setting.num_drafts)
        for size in self.tuning.options.batch_sizes if valid else ():
            explained = [found for found in valid if not self._unexplained(found)]
            best = max(found.tokens_per_second(size) for found in explained)
            for found in valid:
                speed = found.tokens_per_second(size)
                yield (
                    str(size),
                    f"{found.step_ms[size]:.2f}",
                    f"{speed:.0f}",
                    f"{speed / best:.0%}",
                    f"{found.acceptance_length:.2f}",
                    " ".join(f"{rate:.2f}" for rate in found.acceptance),
                    f"{found.setting}{' *' if self._unexplained(found) else ''}",
                )

    def _show_answer(self, out: OutputConsole) -> None:
        answer = self.answer
        if answer is None:
            out.write_line("no answer: there are no numbers for K = 0", "bold red")
            return
        if answer.setting.num_drafts:
            for size, setting in answer.by_batch_size.items():
                gain = answer.speed_up[size]
                out.write_line(
                    f"answer, batch {size}: {setting}, {gain:.2f} times as fast as K = 0"
                )
        else:
            marked = any(map(self._unexplained, self.tuning.measurements))
            which = "no setting without *" if marked else "no setting"
            out.write_line(f"answer: leave drafts off, {which} is clearly faster than K = 0")
        if gains := self._plugin_gain(answer):
            gain = statistics.geometric_mean(gains.values())
            temperature = self.tuning.options.sampling.get("temperature")
            where = f"at T = {temperature:g}" if temperature else "with greedy requests"
            verdict = f"gains {gain:.2f} {where}"
            if gain < 1 + TOLERANCE:
                verdict = f"does not gain {where}: {gain:.2f}"
            shown = ", ".join(f"batch {size}: {value:.2f}" for size, value in gains.items())
            out.write_line(
                f"the plugin {verdict} (tokens per second over {answer.setting.without_plugin()}; "
                f"{shown})"
            )
        elif answer.setting.num_drafts and self.tuning.options.embedded is None:
            out.write_line(
                "what the plugin gains is not known, since vLLM alone failed: the gains above are "
                "over K = 0 with the plugin",
                "bold red",
            )
        if self.tuning.options.embedded is not None:
            options = yaml.safe_dump(self._options(answer), width=math.inf, sort_keys=False)
            out.write_line(options.rstrip())
            return
        _, model, *others = self.tuning.options.engine_arguments
        words = ["vllm", "serve", model, *others]
        for name, value in answer.options().items():
            words += [name, json.dumps(value)]
        out.write_line(shlex.join(words))
