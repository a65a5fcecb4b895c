"""The table of options in ``mtp_plugin/requests/README.md`` is the one that admission goes by.

``python -m tests.test_readme_options`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.config import MTPPluginOptions
from mtp_plugin.ops.logit_rows import ThinkingRule
from mtp_plugin.ops.logprobs import LOGPROB_OPTIONS
from mtp_plugin.requests.admission import unsupported_options
from mtp_plugin.requests.options import (
    DRAFTS_OF_VERIFICATION,
    HOST_OPTIONS,
    IGNORED_OPTIONS,
    LOGPROBS_MODE,
    OPTIONS,
    RENAMED_OPTIONS,
    WORDS_OF_TYPES,
    Option,
    SamplingParams,
)
from mtp_plugin.requests.thinking import ThinkingEnd
from mtp_plugin.speculative.host import DecodingOptions, may_speculate, read_request
from mtp_plugin.speculative.sampler import OWN_OPTIONS
from mtp_plugin.speculative.verification import BUILT, Verifier, make_modes

PAGE = Path(__file__).parent.parent / "mtp_plugin" / "requests" / "README.md"
COLUMNS = (
    "option",
    "what it does",
    "values",
    "other names",
    "given",
    "in TensorRT-LLM's request",
    "given there",
    "note",
)
HEAD = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
HEAD_ELSEWHERE = ["| name elsewhere | taken | instead of all else |", "|---|---|---|"]
RELAXED, SYNTHETIC, NO_DRAFTS = "relaxed", "synthetic", "no drafts"


def decoding_options() -> dict[str, DecodingOptions]:
    """A config for each way to verify that there is."""
    options = {
        name: DecodingOptions(
            max_draft_len=1,
            mtp=MTPPluginOptions(verification=name, draft_sampling=drafts[0]),  # type: ignore[arg-type]
        )
        for name, drafts in DRAFTS_OF_VERIFICATION.items()
        if name in BUILT
    }
    options[RELAXED] = DecodingOptions(
        max_draft_len=1, use_relaxed_acceptance_for_thinking=True, thinking_tokens=(1, 2)
    )
    synthetic = MTPPluginOptions(verification=SYNTHETIC, synthetic_acceptance=0.5)
    options[SYNTHETIC] = DecodingOptions(max_draft_len=1, mtp=synthetic)
    options[NO_DRAFTS] = DecodingOptions(max_draft_len=0)
    return options


def served() -> dict[str, frozenset[str]]:
    """The options that are given, by what drafts are verified with."""
    cpu = torch.device("cpu")
    thinking = ThinkingRule.of(ThinkingEnd(1, (2,)), cpu)
    return {
        name: OWN_OPTIONS
        | LOGPROB_OPTIONS
        | Verifier(make_modes(options, cpu), thinking).served_options
        for name, options in decoding_options().items()
    }


def given(option: Option, by_name: Mapping[str, frozenset[str]]) -> str:
    if option.name == LOGPROBS_MODE:
        return "as the config says"
    names = [name for name, options in by_name.items() if option.name in options]
    if not names:
        return "refused"
    others = [name for name in by_name if name not in names]
    if others == [SYNTHETIC]:
        return f"always, but for {SYNTHETIC}"
    return ", ".join(names) if others else "always"


ASKING: dict[str, Any] = {
    "relaxed_acceptance": False,
    "top_p": 0.5,
    "min_p": 0.5,
    "logit_bias": torch.ones(3),
    "bad_words": [[3]],
}
"""Values of a host's request that sets an option; for all others it is 2."""


def refused_inside(option: Option, field: str, names: frozenset[str]) -> list[str]:
    """Why a request of TensorRT-LLM that sets an option by this field is refused."""
    config = SimpleNamespace(temperature=0.5 if option.draws else None)
    request = SimpleNamespace(sampling_config=config)
    name = field.removeprefix("config.")
    setattr(request if name == field else config, name, ASKING.get(option.name, 2))
    return unsupported_options(request, served=names)


def given_inside(option: Option, names: frozenset[str]) -> str:
    """Whether a request of TensorRT-LLM gets an option; empty: it has no field for it."""
    if option.name == LOGPROBS_MODE:
        return "as the config says"
    if not option.host:
        return "given" if option.host_reads else ""
    return "refused" if refused_inside(option, option.host[0], names) else "given"


def is_given(cell: str, mode: str) -> bool:
    """Whether a cell of the page says so."""
    first, _, but = cell.partition(", but for ")
    return mode != but and (first == "always" or mode in cell.split(", "))


def row(option: Option, by_name: Mapping[str, frozenset[str]]) -> str:
    cells = (
        f"`{option.name}`",
        option.about,
        option.values.words,
        ", ".join(f"`{name}`" for name in option.elsewhere),
        given(option, by_name),
        ", ".join(f"`{name.removeprefix('config.')}`" for name in option.host + option.host_reads),
        given_inside(option, by_name["coupled"]),
        option.differs,
    )
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def table() -> list[str]:
    by_name = served()
    return HEAD + [row(option, by_name) for option in (*OPTIONS.values(), *HOST_OPTIONS)]


def elsewhere() -> Iterator[str]:
    """The table of what other engines alone have."""
    yield from HEAD_ELSEWHERE
    for name in sorted({*IGNORED_OPTIONS, *RENAMED_OPTIONS}):
        taken = [
            WORDS_OF_TYPES[value] if isinstance(value, type) else f"`{value!r}`"
            for value in IGNORED_OPTIONS.get(name, ())
        ]
        cells = f"`{name}`", ", ".join(taken), RENAMED_OPTIONS.get(name, "")
        yield f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def format_value(head: str = HEAD[0]) -> tuple[list[str], slice]:
    """The page's lines, and where the table of this head is."""
    lines = PAGE.read_text(encoding="utf-8").split("\n")
    start = head[: head.index("|", 1)]
    first = next(i for i, line in enumerate(lines) if line.startswith(start))
    following = next(i for i, line in enumerate(lines) if i > first and not line.startswith("|"))
    return lines, slice(first, following)


def test_options_of_the_page() -> None:
    lines, place = format_value()
    for line, wanted in zip(lines[place], table(), strict=True):
        assert line == wanted


def test_what_other_engines_alone_have_on_the_page() -> None:
    lines, place = format_value(HEAD_ELSEWHERE[0])
    for line, wanted in zip(lines[place], elsewhere(), strict=True):
        assert line == wanted


def test_what_modes_and_loops_give_of_drafts_is_marked_so() -> None:
    """Decoding without drafts ignores it."""
    configs = decoding_options().values()
    modes = [mode for options in configs for mode in make_modes(options, torch.device("cpu"))]
    by_modes = {name for mode in modes for name in mode.served_options}
    of_drafts = {name for name, option in OPTIONS.items() if option.of_drafts}
    assert by_modes <= of_drafts
    assert of_drafts - by_modes == {"speculate", "max_draft_len", "relaxed_acceptance"}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != LOGPROBS_MODE])
def test_what_the_table_says_is_what_admission_does(name: str) -> None:
    """Of every option, by every way to verify: given or refused by its name."""
    values = {
        "stop_token_ids": (3,),
        "stop": ("a",),
        "verification": "coupled",
        "draft_sampling": "greedy",
        "top_p": 0.5,
        "min_p": 0.5,
        "relaxed_delta": 0.5,
        "logit_bias": {3: 1.0},
        "allowed_token_ids": (3,),
        "bad_words": ("a",),
        "bad_token_ids": (3,),
    }
    flag = not OPTIONS[name].neutral if isinstance(OPTIONS[name].neutral, bool) else 2
    options = {name: values.get(name, flag)}
    if OPTIONS[name].draws:
        options["temperature"] = 0.5
    params = SamplingParams(**options)
    lines, place = format_value()
    line = next(line for line in lines[place] if line.startswith(f"| `{name}` |"))
    cell = line.split("|")[HEAD[0].split("|").index(" given ")].strip()
    for mode, names in served().items():
        refused = any(one.startswith(f"{name}=") for one in params.unsupported(names))
        assert refused == (not is_given(cell, mode))


HOSTED = [option for option in (*OPTIONS.values(), *HOST_OPTIONS) if option.host]
REFUSED_INSIDE = {
    *(name for name in list(OPTIONS)[list(OPTIONS).index("best_of") :] if OPTIONS[name].host),
    *(option.name for option in HOST_OPTIONS),
}


@pytest.mark.parametrize("option", HOSTED, ids=lambda option: option.name)
def test_what_the_table_says_is_what_a_request_of_a_host_gets(option: Option) -> None:
    """Of every field that requests an option: given or refused by its name."""
    lines, place = format_value()
    line = next(line for line in lines[place] if line.startswith(f"| `{option.name}` |"))
    cell = line.split("|")[HEAD[0].split("|").index(" given there ")].strip()
    if option.name == LOGPROBS_MODE:
        assert cell == "as the config says"
        return
    assert cell == ("refused" if option.name in REFUSED_INSIDE else "given")
    for field in option.host:
        reasons = refused_inside(option, field, served()["coupled"])
        assert bool(reasons) == (cell == "refused"), field
        names = {name.removeprefix("config.") for name in option.host}
        assert all(any(name in reason for name in names) for reason in reasons)


@pytest.mark.parametrize("name", [name for name in OPTIONS if OPTIONS[name].host_reads])
def test_what_is_read_of_a_request_of_a_host(name: str) -> None:
    """Fields of which admission does not know say something all the same."""
    values = {
        "py_max_new_tokens": 3,
        "py_stop_words_list": [[5]],
        "py_stop_ids": [5],
        "py_end_id": 5,
        "py_disable_speculative_decoding": True,
    }

    def read(**fields: Any) -> tuple[Any, bool]:
        request = SimpleNamespace(request_id=7, py_orig_prompt_len=2, **fields)
        return read_request(request, 99).stop, may_speculate(request)

    for field in OPTIONS[name].host_reads:
        assert read(**{field: values[field]}) != read(), field


if __name__ == "__main__":
    for head, rows in ((HEAD, table()), (HEAD_ELSEWHERE, elsewhere())):
        all_lines, at = format_value(head[0])
        all_lines[at] = rows
        PAGE.write_text("\n".join(all_lines), encoding="utf-8")
