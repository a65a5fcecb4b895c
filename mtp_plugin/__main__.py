"""The command ``mtp-plugin``, also ``python -m mtp_plugin``."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

from mtp_plugin.extras import COMMAND_LINE_PACKAGES, require_or_exit

HOSTS = ("sglang", "tensorrt_llm", "vllm")
"""Host engines of ``doctor --host``; ``hosts/NAME/checks.py`` has the checks."""


def main() -> None:
    """Run the command line, or name the missing packages in one line.

    ``doctor --host`` and ``doctor -- LINE`` need none of them.
    """
    try:
        _run()
    except KeyboardInterrupt:  # during imports; commands handle their own
        sys.stderr.write("interrupted\n")
        sys.exit(128 + signal.SIGINT)


def _run() -> None:
    if sys.argv[1:3] == ["doctor", "--"]:
        sys.exit(import_module("mtp_plugin.tools.launch_line").main(sys.argv[3:]))
    host = _host_of(sys.argv[1:])
    if host is not None:
        sys.exit(_examine_host(host, sys.argv[2:]))
    require_or_exit("the command line mtp-plugin", *COMMAND_LINE_PACKAGES)
    from mtp_plugin import cli

    cli.main()


def _host_of(arguments: list[str]) -> str | None:
    """The engine of ``doctor --host ENGINE`` or ``--host=ENGINE``; None: another command."""
    if arguments[:1] == ["doctor"]:
        for place, argument in enumerate(arguments):
            if argument == "--host":
                return "".join(arguments[place + 1 : place + 2])
            if argument.startswith("--host="):
                return argument.removeprefix("--host=")
    return None


def _examine_host(host: str, arguments: list[str]) -> int:
    if host not in HOSTS:
        sys.stderr.write(f"error: --host: expected one of {', '.join(HOSTS)}, got {host!r}\n")
        return 2
    words = [word for given in arguments for word in given.split("=", given.startswith("--"))]
    model = next((n for n in range(0, len(words), 2) if not words[n].startswith("-")), None)
    if model is not None:
        words.insert(model, "--model")
    options = dict(zip(words[::2], words[1::2], strict=False))
    subjects = {"--model": "model_check", "-m": "model_check"}
    also = ""
    if host == "tensorrt_llm":
        subjects |= {"--config": "file_check", "-c": "file_check"}
        also = ", or --config FILE"
    given: list[tuple[str, ...]] = [
        (subjects[name], options.pop(name)) for name in subjects if name in options
    ]
    if options != {"--host": host} or len(words) != 2 + 2 * len(given) or len(given) > 1:
        sys.stderr.write(f"error: --host {host} accepts no other option but --model DIR{also}\n")
        return 2
    ((module, *subject),) = given or [("checks",)]
    exit_code: int = import_module(f"mtp_plugin.hosts.{host}.{module}").main(*subject)
    return exit_code


if __name__ == "__main__":
    main()
