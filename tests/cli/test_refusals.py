"""What commands refuse: exit code 2, and lines of standard error that name it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.calls import EAGLE, VANILLA, VOCAB, Run, open_empty_pipe

GENERATE = ("generate", "-c", "CONFIG")
GRID = (*GENERATE, "-p", "ab", "--grid")
CHOSEN = ("generate", "-m", "MODEL", "-p", "ab")
LIST = ["draft-vocab", "--tokenizer", "MODEL", "--out", "ids.json", "--size", "8"]
LIST += ["--texts", "a.txt"]
JSON_LINES = [word.replace("a.txt", "a.jsonl") for word in LIST]
SERVE = ("serve", "MODEL")
FOUR = {**VANILLA, "max_draft_len": 4}
MORE_LAYERS = "error: a.yaml: max_draft_len: 4 is more than the checkpoint's 3 MTP"
EMPTY = "the prompt is empty"
LONG = "the prompt has 600 tokens, max_seq_len is 512"
MANY = '["a", {"prompt": ""}, "b"]'
NO_LIST = "expected a list of prompts that is not empty"
NO_TEXT = "a.jsonl, line 1: expected a text, or an object with a text as"

# fmt: off
ROWS: list[tuple[tuple[str, ...] | list[str], dict[str, Any], str]] = [
    # arguments, files, and a part of the last line of standard error
    (("generate",), {}, "expected --config FILE or --model DIR"),
    (("doctor",), {}, "expected --config FILE or --model DIR"),
    (("nonsense",), {}, "No such command 'nonsense'"),
    (("doctor", "-m", "MODEL", "--plugin-options", "o"), {},
     "--plugin-options goes with --config alone"),
    (("generate", "-c", "none.yaml"), {}, "error: none.yaml: no such file; expected a YAML file"),
    (("config", "none.yaml"), {}, "error: none.yaml: no such file; expected a YAML file"),
    (("config",), {}, "expected either FILE or --schema"),
    (("config", "--schema", "--model", "x"), {}, "--model goes with FILE alone"),
    (("config", "CONFIG", "--schema"), {}, "expected either FILE or --schema"),
    (("generate", "-m", "none", "-p", "x"), {}, "none: expected a directory, it does not exist"),
    (("generate", "-m", "MODEL", "--k", "1", "--no-mtp"), {},
     "--k and --no-mtp exclude each other"),
    (("generate", "-c", "a.yaml", "-p", "ab"), {"a.yaml": FOUR}, MORE_LAYERS),
    (("generate", "a.yaml", "-p", "ab"), {}, "a.yaml is a config file; type: --config a.yaml"),
    ((*GRID, "worker=eagle"), {}, "expected k=N,N or batch=N,N or dtype=NAME,NAME, got"),
    ((*GRID, "k"), {}, "expected k=N,N or batch=N,N or dtype=NAME,NAME, got 'k'"),
    ((*GRID, "k=1,x"), {}, "expected whole numbers above -1 with commas between, got '1,x'"),
    ((*GRID, "batch=0"), {}, "expected whole numbers above 0 with commas between, got '0'"),
    ((*GRID, "dtype=fp8"), {}, "with commas between, got 'fp8'"),
    ((*GRID, "k=17"), {}, "max_draft_len: should be less than or equal to 16, got 17"),
    ((*GENERATE, "-p", "x", "--tie-tolerance", "nan"), {}, "expected at least 0 ulps, got nan"),
    (("parity", "-c", "CONFIG", "--worker", "eagle"), {}, "give use_mtp_vanilla in a YAML file"),
    (("config", "a.yaml"), {"a.yaml": FOUR}, MORE_LAYERS),
    # requests; a refusal has no line about drafting
    ((*CHOSEN, "-n", "0"), {},
     "error: sampling parameters: max_new_tokens must be an integer >= 1"),
    ((*CHOSEN, "--top-p", "2"), {}, "sampling parameters: top_p must be a number from 0 to 1"),
    ((*CHOSEN, "--option", "no_such=1"), {}, "no_such: unknown option"),
    ((*CHOSEN, "--stop", ""), {},
     "error: sampling parameters: stop must be a string or a sequence"),
    ((*GENERATE, "-p", "x", "--stop", "<eos>x"), {},
     "error: request 0: not supported: stop='<eos>x' ("),
    ((*GENERATE, "-p", "x" * 600), {}, f"error: request 0: {LONG}"),
    ((*GENERATE, "-p", "a", "-p", "x" * 600), {}, f"error: prompt 2 of 2: {LONG}"),
    # prompts; an empty one is found before a weight is loaded
    ((*GENERATE, "-p", ""), {}, f"error: prompt 1 of 1: {EMPTY}"),
    ((*GENERATE, "-p", "a", "-p", ""), {}, f"error: prompt 2 of 2: {EMPTY}"),
    ((*GENERATE, "--prompt-file", "one.txt"), {"one.txt": ""}, f"error: prompt 1 of 1: {EMPTY}"),
    ((*GENERATE, "--num-prompts", "2", "--prompt-file", "-"), {}, f"error: prompt 1 of 1: {EMPTY}"),
    ((*GENERATE, "-p", "a", "--prompt-file", "many.json"), {"many.json": MANY},
     f"error: prompt 3 of 4: {EMPTY}"),
    ((*CHOSEN, "--prompt-file", "no.txt"), {}, "error: prompt file no.txt: no such file"),
    ((*GENERATE, "--prompt-file", "a.md"), {"a.md": "x"},
     "error: prompt file a.md: expected .txt (one prompt), .json (a list) or - (standard input)"),
    ((*GENERATE, "--prompt-file", "a.txt"), {"a.txt": b"\xff"},
     "error: prompt file a.txt: expected UTF-8 text"),
    ((*GENERATE, "--prompt-file", "a.json"), {"a.json": "["},
     "error: prompt file a.json: expected JSON"),
    ((*GENERATE, "--prompt-file", "a.json"), {"a.json": "[]"}, NO_LIST),
    ((*GENERATE, "--prompt-file", "a.json"), {"a.json": '{"prompt": "x"}'}, NO_LIST),
    ((*GENERATE, "--prompt-file", "a.json"), {"a.json": '["x", 3]'},
     "item 2: expected text or an object with the text under 'prompt'"),
    ((*GENERATE, "--prompt-file", "a.json"), {"a.json": '[{"text": "x"}]'},
     "item 1: expected text or an object with the text under 'prompt'"),
    # draft-vocab
    ([*LIST[:-1], "a.csv"], {"a.csv": ""}, "a.csv: expected a file .txt or .jsonl"),
    (LIST, {}, "a.txt: no such file"),
    (LIST, {"a.txt": b"\xff" * 20}, "a.txt: expected UTF-8 text"),
    (LIST, {"a.txt": "short"}, "expected at least 10 records or blocks of text"),
    (JSON_LINES, {"a.jsonl": '{"text": "a"}\n{"a"'}, "a.jsonl, line 2: not valid JSON"),
    (JSON_LINES, {"a.jsonl": '{"input": "a"}'}, NO_TEXT),
    (JSON_LINES, {"a.jsonl": '{"messages": [1]}'}, NO_TEXT),
    (JSON_LINES, {"a.jsonl": '{"messages": [{"content": [{"text": 1}]}]}'}, NO_TEXT),
    ([*LIST, "--size", "3"], {"a.txt": "a"}, f"--size: expected 4 (special tokens) to {VOCAB}"),
    ([*LIST, "--size", "999"], {"a.txt": "a"}, f"to {VOCAB} (vocabulary), got 999"),
    ([*LIST, "--tokenizer", "."], {"a.txt": "a"},
     "--tokenizer .: expected a folder with tokenizer"),
    ([*LIST, "--tokenizer", "x" * 300], {"a.txt": "a"}, "expected a folder with tokenizer"),
    ([*LIST, "--out", "no/ids.json"], {"a.txt": "a"}, "--out no/ids.json: there is no folder no"),
    # serve
    (("serve",), {}, "expected MODEL, --model DIR or --config FILE"),
    ((*SERVE, "--model", "other"), {}, "expected one checkpoint, got"),
    (("generate", "a", "--model", "b"), {}, "expected one checkpoint, got a and --model b"),
    ((*SERVE, "--dtype", "fp4"), {},
     "dtype: should be 'auto', 'float32', 'bfloat16' or 'float16', got 'fp4'"),
    ((*SERVE, "--api-key-file", "missing"), {}, "--api-key-file missing: cannot be read"),
    ((*SERVE, "--chat-template", "missing"), {}, "--chat-template missing: cannot be read"),
    ((*SERVE, "--metrics-prefix", "a b"), {}, "--metrics-prefix: expected a name such as vllm"),
    ((*SERVE, "--drain-seconds", "inf"), {},
     "drain_seconds: expected a number of seconds >= 0, got inf"),
]
# fmt: on


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0][0]}: {row[2][:60]}")
def test_command_is_refused(
    run: Run,
    config: Callable[..., str],
    stdin: Callable[[int], None],
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: tuple[tuple[str, ...], dict[str, Any], str],
) -> None:
    monkeypatch.chdir(tmp_path)
    stdin(open_empty_pipe())
    arguments, files, message = row
    places = {"CONFIG": config(EAGLE), "MODEL": str(checkpoint)}
    for name, content in files.items():
        if isinstance(content, dict):
            content = yaml.safe_dump({"model": str(checkpoint), "speculative_config": content})
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    result = run(*(places.get(word, word) for word in arguments))
    assert (result.code, result.out) == (2, "")
    assert message in " ".join(result.err.splitlines()[-1:])
    assert "Traceback" not in result.err
    assert arguments[0] == "serve" or "drafting" not in result.err
    assert not Path("ids.json").exists()


def test_port_in_use_is_the_last_line(run: Run, checkpoint: Path) -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = str(used.getsockname()[1])
        result = run("serve", str(checkpoint), "--port", port)
    assert (result.code, "serving" in result.err) == (2, False)
    assert result.err.splitlines()[-1] == (
        f"error: cannot listen on 127.0.0.1:{port}: Address already in use; give another --listen "
        "or --port"
    )
