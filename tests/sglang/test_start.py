"""Loading by SGLang's plugin framework, wrong configurations and other plugins."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.arg_groups.overrides import ResolvedView
from sglang.srt.managers.io_struct import SetInternalStateReq
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.server_args import ServerArgs

from mtp_plugin.errors import ConfigError, HostError
from mtp_plugin.hosts.sglang import checks, hooks
from mtp_plugin.hosts.sglang.engine_checks import checked_settings
from mtp_plugin.hosts.sglang.requests import admitted
from mtp_plugin.hosts.sglang.versions import changed_bodies, installed, release
from tests.sglang.toy_engine import make_request, prepare

ROOT = Path(__file__).parents[2]
ENTRY_POINT = "[sglang.srt.plugins]\nmtp_plugin = mtp_plugin.hosts.sglang:register\n"
OTHER = "[sglang.srt.plugins]\nother = other_plugin:register\n"
PREAMBLE = "from tests.sglang.stubs import install; install()\n"
LOAD = f"""{PREAMBLE}
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
kept = [ServerArgs.check_server_args]  # SGLang's registry replaces names of modules
import sglang.srt.managers.scheduler as scheduler
kept.append(scheduler.Scheduler.__init__)
load_plugins()
"""


def arguments(**fields):
    return ServerArgs(
        **{
            "model_path": "dummy",
            "served_model_name": "dummy",
            "chunked_prefill_size": 2048,
            "page_size": 1,
            "device": "cuda",
            "sampling_backend": "pytorch",
            "attention_backend": "triton",
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
            **fields,
        }
    )


def run(code: str, tmp_path: Path, variable: str | None, other: str = "") -> str:
    """Return what a new process prints, in which the entry points are installed."""
    for name, text in (("mtp_plugin", ENTRY_POINT), ("other", OTHER if other else "")):
        if text:
            info = tmp_path / f"{name}-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-x\nVersion: 0\n")
            (info / "entry_points.txt").write_text(text)
    (tmp_path / "other_plugin.py").write_text(other)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("MTP_PLUGIN_SGLANG", None)
    if variable is not None:
        environment["MTP_PLUGIN_SGLANG"] = variable
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return result.stdout + result.stderr[-3000:]


def test_unset_changes_no_object(tmp_path):
    code = f"""{LOAD}
from sglang.srt.plugins.hook_registry import HookRegistry
import sys
print("same", ServerArgs.check_server_args is kept[0], dict(HookRegistry._hooks))
print("imported", sorted(name for name in sys.modules if name.startswith("mtp_plugin")))
"""
    lines = run(code, tmp_path, None).splitlines()
    assert "same True {}" in lines
    (imported,) = [line for line in lines if line.startswith("imported")]
    assert "hooks" not in imported
    assert "torch" not in imported


def test_set_hooks_the_start_and_the_front_end(tmp_path):
    code = f"""{LOAD}
from tests.sglang.test_start import arguments
from sglang.srt.managers.tokenizer_manager import TokenizerManager
kept.append(TokenizerManager._create_tokenized_object)
arguments().check_server_args()
print("hooked", ServerArgs.check_server_args is not kept[0],
      TokenizerManager._create_tokenized_object is not kept[2],
      scheduler.Scheduler.__init__ is not kept[1])
"""
    assert "hooked True True True" in run(code, tmp_path, "{}").splitlines()


def test_a_wrong_option_ends_the_start(tmp_path):
    code = f"""{LOAD}
from tests.sglang.test_start import arguments
arguments().check_server_args()
"""
    output = run(code, tmp_path, '{"verificatoin": "coupled"}')
    assert "ConfigError" in output
    assert "MTP_PLUGIN_SGLANG: verificatoin: unknown option" in output.splitlines()[-1]


OTHERS = {
    "through the registry": """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    target = "sglang.srt.speculative.eagle_utils.eagle_sample"
    HookRegistry.register(target, lambda f, *a: f(*a), HookType.AROUND)
""",
    "by hand": """
def register():
    import sglang.srt.speculative.eagle_utils as module
    module.eagle_sample = lambda *args: None
""",
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_plugin_on_our_targets_ends_the_start(tmp_path, kind):
    code = f"""{LOAD}
from mtp_plugin.hosts.sglang import hooks
hooks.install(hooks.DRAFTS)
"""
    output = run(code, tmp_path, "{}", OTHERS[kind]).splitlines()[-1]
    assert "HostError" in output
    assert "sglang.srt.speculative.eagle_utils.eagle_sample is hooked by another plugin" in output


def test_a_missing_target_ends_the_start(tmp_path):
    code = f"""{LOAD}
from mtp_plugin.hosts.sglang import hooks
del scheduler.Scheduler._add_request_to_queue
hooks.install(hooks.SCHEDULER)
"""
    output = run(code, tmp_path, "{}").splitlines()[-1]
    assert "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue is missing" in output


WRONG = {
    "speculative_eagle_topk": (2, "--speculative-eagle-topk is 2"),
    "speculative_algorithm": ("NGRAM", "--speculative-algorithm is 'NGRAM'"),
    "speculative_adaptive": (True, "--speculative-adaptive is True"),
    "speculative_use_rejection_sampling": (True, "--speculative-use-rejection-sampling is True"),
    "speculative_accept_threshold_single": (0.9, "--speculative-accept-threshold-single is 0.9"),
    "speculative_accept_threshold_acc": (0.9, "--speculative-accept-threshold-acc is 0.9"),
    "pp_size": (2, "--pp-size is 2"),
    "attn_cp_size": (2, "--attn-cp-size is 2"),
    "encoder_only": (True, "--encoder-only is True"),
    "enable_two_batch_overlap": (True, "--enable-two-batch-overlap is True"),
    "enable_pdmux": (True, "--enable-pdmux is True"),
    "dcp_size": (2, "--dcp-size is 2"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend is 'mooncake'"),
    "speculative_skip_dp_mlp_sync": (True, "--speculative-skip-dp-mlp-sync is True"),
    "dllm_algorithm": ("x", "--dllm-algorithm is 'x'"),
    "rl_on_policy_target": ("fsdp", "--rl-on-policy-target is 'fsdp'"),
    "sampling_backend": ("ascend", "--sampling-backend is 'ascend'"),
    "device": ("cpu", "--device is 'cpu'"),
    "is_embedding": (True, "--is-embedding is True"),
}


def test_the_drafter_that_sglang_makes_of_nextn_for_gemma_4_is_named():
    given = ResolvedView(arguments(), {"speculative_algorithm": "FROZEN_KV_MTP"})
    with pytest.raises(ConfigError, match="SGLang reads NEXTN and EAGLE so with the assistant mod"):
        checked_settings(given, {"MTP_PLUGIN_SGLANG": "{}"})


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_is_refused_by_name(name):
    value, message = WRONG[name]
    assert hasattr(arguments(), name) or f"ServerArgs.{name}" in installed().lacks
    given = ResolvedView(arguments(), {name: value})
    with pytest.raises(ConfigError) as error:
        checked_settings(given, {"MTP_PLUGIN_SGLANG": "{}"})
    assert str(error.value).startswith(
        f"mtp_plugin is on (MTP_PLUGIN_SGLANG is set), but {message}"
    )


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize(
    "names",
    [
        ["enable_multi_layer_eagle"],
        ["enable_hisparse"],
        ["enable_pd_role_switch"],
        ["disaggregation_decode_enable_radix_cache", "enable_hierarchical_cache"],
    ],
)
def test_what_a_split_refuses_is_named(mode, names):
    environment = {"MTP_PLUGIN_SGLANG": "{}"}
    wrong = dict.fromkeys(names, True)
    checked_settings(ResolvedView(arguments(), wrong), environment)
    split = {"disaggregation_mode": mode}
    checked_settings(ResolvedView(arguments(), split), environment)
    given = ResolvedView(arguments(), {**wrong, **split})
    if mode == "prefill" and "enable_hierarchical_cache" in names:
        checked_settings(given, environment)  # the option of the engine that decodes is unused
    else:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
        with pytest.raises(ConfigError, match=rf"\(MTP_PLUGIN_SGLANG is set\), but {flags} "):
            checked_settings(given, environment)


def test_all_problems_are_in_one_message():
    environment = {"MTP_PLUGIN_SGLANG": json.dumps({"verification": "block"})}
    given = ResolvedView(arguments(), {"attn_cp_size": 2, "pp_size": 2})
    with pytest.raises(ConfigError) as error:
        checked_settings(given, {**environment, "SGLANG_SIMULATE_ACC_LEN": "2.5"})
    for part in (
        "attn-cp-size",
        "pp-size",
        "verification: block",
        "SGLANG_SIMULATE_ACC_TOKEN_MODE",
    ):
        assert part in str(error.value)


@pytest.fixture
def scheduler(monkeypatch):
    """A scheduler before its ``__init__``, and that."""
    prepare()
    monkeypatch.setenv("MTP_PLUGIN_SGLANG", "{}")
    pool = ReqToTokenPool(4, 16, "cpu", False)
    runner = SimpleNamespace(req_to_token_pool=pool, model_config=SimpleNamespace(vocab_size=50))

    def original(self, _, ports):
        assert ports == "ports"
        self.random_seed = 9  # as SGLang broadcasts it from the first rank
        hooks._engine.attach(runner)

    group = SimpleNamespace(world_size=1, rank_in_group=0)
    ranks = SimpleNamespace(dp_rank=None, dp_size=1)
    return SimpleNamespace(tp_group=group, dp_tp_group=group, ps=ranks), original


def test_nodes_with_seeds_of_their_own_give_requests_the_same(scheduler):
    seeds = []
    for seed in (1, 2):
        hooks._scheduler_init(scheduler[1], scheduler[0], arguments(random_seed=seed), "ports")
        req = make_request("r", [1])
        hooks._engine.admit(req)
        seeds.append(admitted(req).seed)
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize("attention_rank", [0, 1])
def test_replicas_have_seeds_and_alarms_of_their_own(scheduler, attention_rank):
    scheduler, original = scheduler
    scheduler.tp_group.rank_in_group = 2
    scheduler.dp_tp_group = SimpleNamespace(rank_in_group=attention_rank)
    seeds, ranks = [], contextlib.nullcontext()
    for rank in range(2):
        scheduler.ps = SimpleNamespace(dp_rank=rank, dp_size=2)
        if not installed().has_rank_state:
            ranks = runtime_context.get_parallel().override(dp_rank=rank, num_dp_ranks=2)
        with ranks:
            hooks._scheduler_init(original, scheduler, arguments(), "ports")
        for name in "ab":
            req = make_request(name, [1])
            hooks._engine.admit(req)
            seeds.append(admitted(req).seed)
        assert (hooks._engine.counts._alarm is None) == bool(attention_rank)
    assert len(set(seeds)) == 4


def test_a_scheduler_with_the_plugin_says_so(monkeypatch, caplog, scheduler):
    scheduler, original = scheduler
    with caplog.at_level("INFO"):
        hooks._scheduler_init(original, scheduler, arguments(), "ports")
    (line,) = [r.getMessage() for r in caplog.records if "mtp_plugin on" in r.getMessage()]
    assert line == (
        "mtp_plugin on: verification coupled, 3 drafts per step, torch kernels, drafter eagle"
    )
    tags = '{"thinking_begin_token": 4, "thinking_end_token": 50}'
    monkeypatch.setenv("MTP_PLUGIN_SGLANG", tags)
    with pytest.raises(ConfigError, match="thinking_end_token: expected a token id of the model"):
        hooks._scheduler_init(original, scheduler, arguments(), "ports")
    with pytest.raises(HostError, match="found no pools"):
        hooks._scheduler_init(lambda *_: None, scheduler, arguments(), "ports")


@pytest.mark.parametrize("rows", [torch.ones(8, 16), torch.zeros(8, 8)])
def test_words_of_a_split_that_are_not_free_end_the_start(scheduler, rows):
    scheduler, original = scheduler
    given = original, scheduler, arguments(disaggregation_mode="decode"), "ports"
    scheduler.disagg_metadata_buffers = SimpleNamespace(output_ids=rows.int())
    with pytest.raises(HostError, match="uses words 8 to 13 of MetadataBuffers"):
        hooks._scheduler_init(*given)
    scheduler.disagg_metadata_buffers.output_ids = torch.zeros(8, 16, dtype=torch.int32)
    hooks._scheduler_init(*given)


@pytest.mark.parametrize("name", ["single", "acc"])
def test_a_threshold_that_is_set_later_is_refused(name, caplog):
    prepare()
    name = f"speculative_accept_threshold_{name}"
    found = Scheduler.set_internal_state(None, SetInternalStateReq(server_args={name: 0.5}))
    assert not found.updated
    assert f"refuses the new state: --{name.replace('_', '-')} is 0.5: it changes" in caplog.text
    request = SetInternalStateReq(server_args={name: 1.0, "pp_max_micro_batch_size": 2})
    assert hooks._set_internal_state(lambda _, given: given, None, request) is request


def test_the_doctor_names_every_problem(monkeypatch, capsys):
    prepare()  # hooked functions are compared, too
    monkeypatch.setattr(checks, "entry_points", lambda **_: ["mtp_plugin"])
    seen = checks.examine({"MTP_PLUGIN_SGLANG": "{}", "SGLANG_PLUGINS": "other, mtp_plugin"})
    assert seen.problems == changed_bodies(release()) == []
    assert seen.notes[0].startswith(f"sglang {release()}, tested on: GPU and CPU; ")
    assert seen.notes[1] == "MTP_PLUGIN_SGLANG={}: the plugin is on"
    assert "the plugin is off" in checks.examine({}).notes[1]
    monkeypatch.setattr(checks, "entry_points", lambda **_: [])
    seen = checks.examine({"MTP_PLUGIN_SGLANG": '{"x": 1}', "SGLANG_PLUGINS": "other"})
    for problem, part in zip(
        seen.problems,
        ("entry point mtp_plugin", "SGLANG_PLUGINS=other leaves out", "x: unknown option"),
        strict=True,
    ):
        assert part in problem
    monkeypatch.setenv("MTP_PLUGIN_SGLANG", "[")
    assert checks.main() == 1
    assert capsys.readouterr().out.endswith("doctor --host sglang  # with this corrected\n")
