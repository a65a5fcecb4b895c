"""The runner of the host's own tests, on made-up ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.contract_host.line_rules import LINES
from tests.contract_host.upstream import find_tests, imported_names, main, on_device

OF_THE_PIECES = """
import unittest

import pytest
import torch

import tensorrt_llm
from tensorrt_llm import LLM
from tensorrt_llm._torch.attention_backend import TrtllmAttentionMetadata
from tensorrt_llm._torch.metadata import KVCacheParams
from tensorrt_llm._torch.speculative.mtp import MTPHiddenStatesManager, MTPSpecMetadata, MTPWorker
from tensorrt_llm.llmapi import MTPDecodingConfig
from utils.helpers import model_folder

K, HIDDEN = 2, 4


class Pieces(unittest.TestCase):
    def setUp(self):
        tensorrt_llm.logger.set_level("warning")
        self.config = MTPDecodingConfig(num_nextn_predict_layers=K, use_advanced_mtp_sampler=True)
        self.config.num_nextn_predict_layers = K
        attn = TrtllmAttentionMetadata(max_num_requests=2, max_num_tokens=8, kv_cache_manager=None)
        attn.seq_lens = torch.tensor([3, 3], dtype=torch.int)
        attn.num_contexts = 1
        attn.kv_cache_params = KVCacheParams(use_cache=True, num_cached_tokens_per_seq=[0, 5])
        self.attn = attn

    def test_acceptance(self):
        spec = MTPSpecMetadata(
            max_num_requests=4, spec_dec_mode=self.config.spec_dec_mode, max_draft_len=K,
            max_total_draft_tokens=K, mtp_num_modules=K,
        )
        spec.draft_tokens = torch.tensor([3, 1], dtype=torch.int, device="cuda")
        logits = torch.eye(6, device='cuda')[[5, 3, 2, 4]]
        tokens, counts = MTPWorker(self.config).sample_and_accept_draft_tokens(
            None, logits, spec, self.attn
        )
        torch.testing.assert_close(counts, torch.tensor([1, 2], dtype=torch.int, device="cuda"))
        assert tokens[1, :2].tolist() == [3, 2]

    def test_history(self):
        manager = MTPHiddenStatesManager(
            config=self.config, dtype=torch.float32, hidden_size=HIDDEN, max_num_requests=2
        )
        slots = [manager.slot_manager.add_slot(number) for number in range(2)]
        spec = MTPSpecMetadata(
            max_num_requests=4, spec_dec_mode=self.config.spec_dec_mode, max_draft_len=K,
            mtp_num_modules=K, mtp_hidden_states_manager=manager,
        )
        spec.request_ids = range(2)
        spec.prepare()
        MTPWorker(self.config).update_mtp_hidden_states(
            input_ids=torch.arange(6, dtype=torch.int, device="cuda"),
            hidden_states=torch.ones(6, HIDDEN, device="cuda"),
            num_accepted_tokens=torch.tensor([1, 2], dtype=torch.int, device="cuda"),
            spec_metadata=spec, attn_metadata=self.attn,
        )
        assert manager.mtp_past_tokens_pool[slots].tolist() == [[1, 2], [3, 4]]


@pytest.mark.high_cuda_memory
def test_engine():
    LLM(model=model_folder())
"""


@pytest.mark.parametrize("line", sorted(LINES))
def test_passes_and_names_what_is_not_applicable(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deeper" / "test_made_up.py"
    path.parent.mkdir()
    path.write_text(OF_THE_PIECES)
    before, searched = set(sys.modules), list(sys.path)
    arguments = ["--tests", str(tmp_path), "--line", line, "--file-name", "test_made_up.py"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == (
        f"{path}: 2 passed, 0 failed, 1 not applicable\n"
        "  not applicable test_engine: needs a checkpoint, a GPU and the host's whole engine\n"
    )
    left = {name for name in set(sys.modules) - before if name.startswith(("tensorrt", "utils"))}
    assert not left
    assert sys.path == searched
    assert path.read_text() == OF_THE_PIECES


def test_reports_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_made_up.py"
    path.write_text(
        OF_THE_PIECES.replace("tensor([1, 2]", "tensor([1, 3]", 1)
        + "\n\ndef test_of_an_engine():\n    LLM(model='tiny')\n"
    )
    assert main(["--tests", str(path), "--line", "1.2"]) == 1
    first, *failed = capsys.readouterr().out.splitlines()
    assert first == f"{path}: 1 passed, 2 failed, 1 not applicable"
    assert (
        "failed Pieces::test_acceptance: AssertionError: Tensor-likes are not equal!" in failed[0]
    )
    assert failed[1] == (
        "  failed test_of_an_engine: NotImplementedError: tensorrt_llm.LLM is not part of the MTP "
        "pieces"
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("def test_it():\n  return (\n", "SyntaxError"),
    ],
)
def test_reports_files_that_cannot_be_read(
    text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_made_up.py"
    path.write_text(text)
    assert main(["--tests", str(path), "--line", "1.3b"]) == 1
    assert line in capsys.readouterr().out


def test_a_folder_without_tests(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"to be or to hold a test_mtp\.py$"):
        find_tests(tmp_path, "test_mtp.py")


def test_only_whole_strings_name_another_device() -> None:
    text = 'a = f("cuda", \'cuda\')  # "cuda"\nb = "cuda:0 \'cuda\'"; c = torch.cuda, "cuda"\n'
    assert on_device(text, "cpu") == (
        "a = f('cpu', 'cpu')  # \"cuda\"\nb = \"cuda:0 'cuda'\"; c = torch.cuda, 'cpu'\n"
    )
    assert on_device(text, "cuda") == text


def test_reads_what_is_imported_from_the_host() -> None:
    text = (
        "import torch\nfrom tensorrt_llm.a import b, c as d\nfrom utils.e import f\nfrom g import h"
    )
    assert imported_names(text) == [
        ("tensorrt_llm.a", "b"),
        ("tensorrt_llm.a", "c"),
        ("utils.e", "f"),
    ]
