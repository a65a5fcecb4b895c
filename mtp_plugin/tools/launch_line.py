"""``mtp-plugin doctor -- LINE``: what the plugin says of a command that starts vLLM or SGLang.

Its flags become the objects that the adapters' own checks read; no engine starts. Where the engine
is installed, its own parser reads the flags as well.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any

from mtp_plugin.checkpoint import describe, read_checkpoint, write_report
from mtp_plugin.checkpoint.files import download_command
from mtp_plugin.errors import (
    LONGEST_LINE,
    CheckpointError,
    ConfigError,
    describe_error,
    expect,
    format_value,
    one_line,
    shell_quote,
)
from mtp_plugin.hosts.sglang import VARIABLE
from mtp_plugin.tools.launch_engines import (
    ENGINES,
    Engine,
    Findings,
    Values,
    flag,
    is_folder,
    program_end,
    written,
)

MAX_WORDS, MAX_LINE, MAX_JSON, MAX_KEYS = 2**14, 2**16, 2**20, 16
"""Words of a line, characters of one in quotes and of a value, and keys of ``--name.key.key``."""
MAX_TRIED = 64
"""Parts of a line that are left out one by one, to find those that are refused."""
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_NUMBER = re.compile(r"-[0-9.]+")
_VERSION = re.compile(r"(vllm|sglang)\S*?[:=]v?([0-9]{1,4}\.[0-9]{1,4}(?:\.[0-9]{1,4})?)")
_SHELL_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_SWITCH = re.compile(
    r"(?:enable|disable|no|trust|enforce|async|is|return|skip)_.*|headless|language_model_only|"
    r"encoder_only|speculative_(?:adaptive|use_rejection_sampling)|"
    r"disaggregation_(?:decode_)?enable_.*"
)
"""Flags without a value."""
_CONTAINERS = frozenset(("docker", "podman", "nerdctl"))
_ENDS = frozenset(("|", "||", "&", "&&", ";", ">", ">>", "2>&1"))
"""Words of a shell that end a command."""
OK, PROBLEM, WRONG_USE = 0, 1, 2


@dataclass(frozen=True)
class Line:
    """A command that starts an engine."""

    engine: Engine
    front: tuple[str, ...]
    """Variables of the environment, other programs, and the engine's."""
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    """(name with underscores, its words) in their order; MODEL has the name ``""``."""
    values: Values

    @property
    def is_container(self) -> bool:
        return not _CONTAINERS.isdisjoint(self.front)

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the environment that the line sets."""
        found = map(_VARIABLE.fullmatch, self.front)
        return {match[1]: match[2] for match in found if match}


def read_line(words: Sequence[str]) -> Line:
    """Read a command, given as its words, or as one word with all of it.

    Raises:
        ConfigError: it starts no engine that is known, is too long, has unbalanced quotes, or a
            value is not the JSON that it has to be.
    """
    if len(words) == 1:
        long = f"launch line: expected at most {MAX_LINE} characters in quotes"
        expect(len(words[0]) <= MAX_LINE, ConfigError, long)
        try:
            words = shlex.split(words[0].replace("\\\n", " "))
        except ValueError as error:
            raise ConfigError(f"launch line: expected a shell command: {error}") from None
    expect(len(words) <= MAX_WORDS, ConfigError, f"launch line: expected at most {MAX_WORDS} words")
    words = [*words]
    ends = [place for place, word in enumerate(words) if word in _ENDS]
    for place in range(len(words)):
        for engine in ENGINES:
            start = program_end(engine, words, place)
            if start is not None:
                front = tuple(words[max((n + 1 for n in ends if n < place), default=0) : start])
                rest = words[start : min((n for n in ends if n > place), default=None)]
                flags = (*_flags(engine, rest),)
                return Line(engine, front, flags, _values(engine, flags))
    raise ConfigError(
        "launch line: expected a command with vllm serve, sglang serve, python -m "
        f"sglang.launch_server or an image of them, got {format_value(' '.join(words[:3]))}"
    )


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and _NUMBER.fullmatch(word) is None


def _flags(engine: Engine, words: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each flag with its words; words that no flag takes have the name ``""``."""
    place = 0
    while place < len(words):
        word, end, name = words[place], place + 1, ""
        if _is_flag(word):
            first, has_value, _ = word.partition("=")
            begin, dot, keys = first.lstrip("-").replace("-", "_").partition(".")
            name = engine.aliases.get(begin, begin) + dot + keys
            has_none = has_value or _SWITCH.fullmatch(name)
            if not has_none and end < len(words) and not _is_flag(words[end]):
                end += 1
        yield name, tuple(words[place:end])
        place = end


def _values(engine: Engine, flags: Sequence[tuple[str, tuple[str, ...]]]) -> Values:
    """Return the value of every flag; MODEL is that of `Engine.model_flag`."""
    values: Values = {}
    for name, words in flags:
        first, has_value, value = words[0].partition("=")
        given = [value] if has_value else [*words[1:]]
        name, dot, keys = name.partition(".")
        if not name:
            values.setdefault(engine.model_flag, words[0])
        elif not given:
            values[name.removeprefix("no_")] = not name.startswith("no_")
        elif dot:
            _set(values, [name, *keys.split(".")], _parsed(given[0], first))
        elif name in (engine.model_flag, "spec_model", "speculative_draft_model_path"):
            values[name] = given[0]
        else:
            values[name] = _parsed(given[0], first)
    return values


def _parsed(text: str, flag: str) -> Any:
    """Return a number or the content of JSON, else the text.

    Raises:
        ConfigError: it begins like JSON and is none, or is too long.
    """
    expect(len(text) <= MAX_JSON, ConfigError, f"{flag}: expected at most {MAX_JSON} characters")
    try:
        content = json.loads(text)
        json.dumps(content)  # the command to type next has it
        return content
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith(("{", "[")):
            return text
        raise ConfigError(
            f"{flag}: expected JSON in single quotes, got {format_value(text)}: "
            f"{describe_error(error)}"
        ) from None


def _set(values: Values, keys: Sequence[str], value: Any) -> None:
    """Set a value in nested mappings."""
    expect(len(keys) <= MAX_KEYS, ConfigError, f"--{keys[0]}: expected at most {MAX_KEYS} keys")
    for key in keys[:-1]:
        inner = values.get(key)
        values[key] = values = dict(inner) if isinstance(inner, dict) else {}
    values[keys[-1]] = value


def main(words: Sequence[str]) -> int:
    """Print the verdict on a command, what it lacks, and the command to type next.

    Returns:
        The exit code: 0: it starts with what the last line adds; 1: there are problems; 2: it is no
        command that starts an engine.
    """
    found = Findings()
    try:
        line = read_line(words)
        engine, environment = line.engine, {**os.environ, **line.variables}
        engine.complete(dict(line.values), environment, Findings())  # before slow imports
        values = {**line.values, **_own_values(line, found)}
        engine.complete(values, environment, found)
    except ConfigError as error:
        sys.stderr.write(f"error: {one_line(error)}\n")
        return WRONG_USE
    facts = [("drafts", found.drafts), *_checkpoint(line, values, found)]
    if line.is_container:
        found.notes.append("container: its image needs this package, see Install in the README")
    found.problems += _version_problems(line)
    for name in engine.unchecked:
        value = values.get(name)
        if value is True or value not in (None, False, 1, "auto"):
            found.notes.append(f"unchecked: {flag(name)}: no output was compared with it")
    refused = _problems(engine, values, environment)
    left_out = _correct(line, values, environment, refused)
    is_corrected = refused and not _problems(engine, values, environment)
    if is_corrected and not found.problems:
        found.notes.append(f"the next line leaves out {', '.join(left_out)}")
    found.problems += refused
    verdict = "does not start" if found.problems else "starts"
    facts.append(("verdict", f"{engine.title} {verdict} with the plugin"))
    write_report(facts, ())
    for note in found.notes:
        sys.stdout.write(f"{one_line(note)}\n")
    for kind, lines in (("missing", found.missing), ("problem", found.problems)):
        for text in lines:
            sys.stdout.write(f"{kind}: {one_line(text)}\n")
    is_whole = len(found.problems) == len(refused) and (is_corrected or not refused)
    again = "mtp-plugin doctor -- LINE  # with this corrected"
    command = _command(line, values, environment, left_out) if is_whole else again
    sys.stdout.write(f"next: {one_line(command)}\n")
    return PROBLEM if found.problems else OK


def _own_values(line: Line, found: Findings) -> Values:
    """Return what the engine's own parser reads, if it is installed; add what it refuses."""
    engine, printed = line.engine, io.StringIO()
    if find_spec(engine.name) is None:
        return {}
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            parser, words = engine.parser([word for _, words in line.flags for word in words])
            read = vars(parser.parse_args(words))
        return {name: each for name, each in read.items() if each != parser.get_default(name)}
    except ImportError as error:
        found.notes.append(f"{engine.title} cannot be imported: {describe_error(error)}")
        return {}
    except SystemExit:
        given = re.findall(r"error: (.*)", printed.getvalue())
        message = given[-1] if given else "it only prints help"
    except Exception as error:  # of any module of the engine
        message = describe_error(error)
    found.problems.append(f"{engine.title} does not read the line: {message}")
    return {}


def _checkpoint(line: Line, values: Values, found: Findings) -> Iterator[tuple[str, str]]:
    """Yield what is said of MODEL; add its problems."""
    model, engine = values.get(line.engine.model_flag), line.engine
    if not is_folder(model):
        yield (
            "model",
            f"{model or 'not given'}: its files are not here, the flags alone are checked",
        )
        command = download_command(model) if isinstance(model, str) else None
        if command is not None:
            yield "download", f"{command}  # then name this folder: it is checked, too"
        return
    check = import_module(f"mtp_plugin.hosts.{engine.name}.model_check")
    try:
        checkpoint = read_checkpoint(str(model))
    except CheckpointError as error:
        found.problems += str(error).splitlines()
        return
    yield from (*describe(checkpoint), (engine.title, check.verdict(checkpoint)))
    found.problems += check.problems(checkpoint)
    spec = values["speculative_config"] if engine.name == "vllm" else {}
    has_draft_model = values.get("speculative_draft_model_path") or spec.get("model")
    uses_layers = found.drafts.startswith(("mtp,", "EAGLE,")) and not has_draft_model
    if uses_layers and checkpoint.family and not checkpoint.declared:
        found.problems.append(
            f"{found.drafts}: the checkpoint has no MTP layers: take another one, a draft model, "
            "or leave out the options of drafts"
        )


def _version_problems(line: Line) -> Iterator[str]:
    """Yield versions in names of images or packages that are not served."""
    for match in filter(None, map(_VERSION.search, line.front)):
        problem = line.engine.version_problem(match[2]) if match[1] == line.engine.name else None
        if problem is not None:
            yield f"{match[0]} does not fit the plugin: {problem}"


def _problems(engine: Engine, values: Values, environment: Mapping[str, str]) -> list[str]:
    try:
        return list(dict.fromkeys(engine.problems(values, environment)))
    except ConfigError as error:
        return str(error).splitlines()
    except Exception as error:  # a value of any type
        return [f"a value cannot be read: {describe_error(error)}"]


def _correct(
    line: Line, values: Values, environment: dict[str, str], problems: Sequence[str]
) -> list[str]:
    """Leave out what makes problems, as the adapter advises; return the names."""
    engine, left_out = line.engine, []
    number = len(problems)
    for kind, name in [*islice(engine.removable(values), MAX_TRIED)] if problems else []:
        tried, variables = dict(values), dict(environment)
        if kind == "variable":
            if name in line.variables:  # not one of the shell
                del variables[name]
        elif kind == "key":
            spec = values["speculative_config"]
            tried["speculative_config"] = {key: spec[key] for key in spec if key != name}
        else:
            tried = {key: values[key] for key in values if not _is_of([name], key)}
        engine.complete(tried, variables, Findings())
        now = len(_problems(engine, tried, variables))
        if now < number:
            number = now
            left_out.append(name)
            for old, new in ((values, tried), (environment, variables)):
                old.clear()
                old.update(new)
    return left_out


def _is_of(names: Sequence[str], name: str) -> bool:
    """Return whether a flag, or a key of it, is one of ``names``."""
    return name.partition(".")[0] in names


def _command(
    line: Line, values: Values, environment: Mapping[str, str], left_out: Sequence[str]
) -> str:
    """Return the whole command, with what `Engine.complete` set and without what is left out."""
    engine, front = line.engine, [*line.front]
    for word in line.front:
        if word.partition("=")[0] in left_out:
            place = front.index(word)
            is_option = front[place - 1 : place] in (["-e"], ["--env"])
            del front[place - is_option : place + 1]
    if engine.name == "sglang" and not environment.get(VARIABLE, "").strip():
        place = front.index("run") + 1 if line.is_container and "run" in front else 0
        front[place:place] = [*(["-e"] if place else []), f"{VARIABLE}={{}}"]
    gone = (*engine.rewritten, *left_out)
    kept = [w for name, words in line.flags if not _is_of(gone, name) for w in words]
    new = " ".join(map(_quoted, written(engine, values)))
    command = f"{' '.join(map(_quoted, (*front, *kept)))} {new}".rstrip()
    return command if len(command) <= LONGEST_LINE else f"your command, with {new}"


def _quoted(word: str) -> str:
    """Return a word of a shell; variables of a shell and of the environment stay."""
    match = _VARIABLE.fullmatch(word)
    if match:
        return f"{match[1]}={_quoted(match[2])}"
    return word if _SHELL_VARIABLE.fullmatch(word) else shell_quote(word)
