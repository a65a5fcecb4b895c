"""Options of requests in SGLang's tokenizer manager and scheduler."""

from __future__ import annotations

import asyncio
from inspect import signature
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams

from mtp_plugin.hosts.sglang import hooks
from mtp_plugin.hosts.sglang.requests import admitted
from mtp_plugin.plugin import CustomVerification, register_verification, unregister_verification
from mtp_plugin.requests.seeds import sample_seed
from tests.sglang.test_start import arguments
from tests.sglang.toy_engine import VOCAB, K, Tokenizer, ToyEngine, make_request, prepare

SEND = "sglang.srt.managers.tokenizer_manager:TokenizerManager._send_one_request"
WRONG = {
    "mtp_verificaton": "coupled",
    "mtp_max_draft_len": K + 1,
    "mtp_verification": "rejection",
    "mtp_relaxed_topk": 5,
}


@pytest.fixture
def manager(monkeypatch):
    prepare()
    monkeypatch.setenv("MTP_PLUGIN_SGLANG", "{}")
    hooks.install(hooks.FRONT_END)
    made = MagicMock()
    made.preferred_sampling_params = None
    made.sampling_params_class = SamplingParams
    made.tokenizer = SimpleNamespace(eos_token_id=7, additional_stop_token_ids=None)
    made.model_config.vocab_size = VOCAB
    made.tokenized_generate_req_type = TokenizedGenerateReqInput
    made.server_args = arguments()
    return made


def tokenized(manager, **fields):
    given = GenerateReqInput(text="x", **fields)
    given.normalize_batch_and_arguments()
    return TokenizerManager._create_tokenized_object(manager, given, "x", [1, 2])


def test_right_options_pass(manager):
    params = {"mtp_verification": "coupled", "mtp_speculate": False, "other": 3}
    made = tokenized(manager, sampling_params={"custom_params": params})
    assert made.sampling_params.custom_params == params


def test_all_wrong_options_are_in_one_error(manager):
    with pytest.raises(ValueError, match="custom_params: ") as error:
        tokenized(
            manager,
            sampling_params={"custom_params": WRONG},
            return_sampling_mask=True,
        )
    for part in (*WRONG, "return_sampling_mask: not supported"):
        assert part in str(error.value)


def test_options_that_the_server_prefers_are_checked(manager):
    manager.preferred_sampling_params = {"custom_params": {"mtp_max_draft_len": K + 1}}
    with pytest.raises(ValueError, match="mtp_max_draft_len: expected at most"):
        tokenized(manager)
    tokenized(manager, sampling_params={"custom_params": {"mtp_max_draft_len": K}})


@pytest.mark.parametrize("given", [5, [], ["mtp_speculate"], "mtp_speculate"])
def test_custom_params_that_are_no_mapping_are_refused(manager, given):
    with pytest.raises(ValueError, match="custom_params: expected a mapping, got "):
        tokenized(manager, sampling_params={"custom_params": given})
    req = make_request("r", [1, 2], custom_params=given)
    ToyEngine(K).admit(req)
    assert req.to_finish.status_code == 400


def test_drafts_of_a_custom_logit_processor_are_withheld(manager):
    assert tokenized(manager, custom_logit_processor="x").custom_logit_processor == "x"
    req = make_request("r", [1, 2], custom_params={"mtp_max_draft_len": 2})
    req.custom_logit_processor = "x"
    ToyEngine(K).admit(req)
    assert admitted(req).options.draft_limit == 0


def test_the_scheduler_refuses_with_the_same_text(manager):
    engine = ToyEngine(K)
    req = make_request("r", [1, 2], custom_params=dict(WRONG))
    engine.admit(req)
    assert isinstance(req.to_finish, FINISH_ABORT)
    assert req.to_finish.status_code == 400
    with pytest.raises(ValueError, match="custom_params: ") as error:
        tokenized(manager, sampling_params={"custom_params": WRONG})
    assert req.to_finish.message == str(error.value)


def test_options_and_seed_stay_when_a_request_comes_again():
    engine = ToyEngine(K)
    req = make_request("r", [1, 2], custom_params={"mtp_max_draft_len": 1})
    engine.admit(req)
    first = admitted(req)
    assert first.options.draft_limit == 1
    engine.admit(req)
    assert admitted(req) is first


class FrontEnd(TokenizerManager):
    """SGLang's front end, which sends nothing."""

    def __init__(self):
        self.rid_to_state, self.sent, self.child_rid_to_logical_rid = {}, [], {}

    async def _tokenize_one_request(self, obj):
        return SimpleNamespace(rid=obj.rid, sampling_params=self.params, time_stats=None)

    def _init_req_state(self, obj, *_):
        self.rid_to_state[obj.rid] = MagicMock()

    def _init_child_req_state(self, _, obj):
        self._init_req_state(obj)

    def _raise_if_logical_rid_aborted(self, rid):
        pass

    async def _wait_one_response(self, obj, *_):
        yield obj.rid

    def _send_one_request(self, request):
        def send(front_end, given):
            front_end.sent.append(given)
            done = asyncio.get_running_loop().create_future()  # 0.5.23 awaits it
            done.set_result(None)
            return done

        return hooks.FRONT_END[SEND](send, self, request)


def outputs_sent(front_end, seed, outputs=3):
    front_end.params = SamplingParams(sampling_seed=seed, n=outputs, max_new_tokens=5)
    given = GenerateReqInput(input_ids=[[1, 2]], sampling_params=[{"n": outputs}])
    given.normalize_batch_and_arguments()
    states = front_end.rid_to_state = {rid: MagicMock() for rid in given.rid}
    handle = front_end._handle_batch_request

    async def send():
        async for _ in handle(given, None, *[states][: len(signature(handle).parameters) - 2]):
            pass

    asyncio.run(send())
    sent, front_end.sent = front_end.sent, []
    return [each for each in sent if each.sampling_params.max_new_tokens]


@pytest.mark.parametrize("seed", [9, -1, None])
def test_each_of_n_outputs_has_its_seed(seed):
    front_end = FrontEnd()
    engine = ToyEngine(0)
    for _ in range(2):
        sent = outputs_sent(front_end, seed)
        assert [each.sampling_params.n for each in sent] == [1, 1, 1]
        reqs = [make_request(each.rid, [1]) for each in sent]
        for req, each in zip(reqs, sent, strict=True):
            req.sampling_params = each.sampling_params
            engine.admit(req)
        if seed is not None:
            expected = [sample_seed(seed % 2**64, i) for i in range(3)]
            assert [admitted(req).seed for req in reqs] == expected
        assert len({admitted(req).seed for req in reqs}) == 3


@pytest.mark.parametrize("seed", [9, None])
def test_outputs_on_two_dp_ranks_differ(seed):
    engines, outputs = [ToyEngine(K), ToyEngine(K)], []
    for rank, engine in enumerate(engines):
        engine.engine.seed_from(0, rank, 2)
    for i, each in enumerate(outputs_sent(FrontEnd(), seed, outputs=4)):
        req = make_request(each.rid, [1])
        req.sampling_params = each.sampling_params
        req.sampling_params.normalize(Tokenizer())
        outputs += engines[i % 2].serve([req], tokens=5)
    assert len(set(map(tuple, outputs))) == 4


def test_outputs_of_a_front_end_without_the_plugin_are_refused():
    engine = ToyEngine(0)
    reqs = [make_request(name, [1], n=3) for name in ("r", "probe")]
    reqs[1].sampling_params.max_new_tokens = 0  # which fills the prefix cache
    for req in reqs:
        engine.admit(req)
    assert "--tokenizer-worker-num" in reqs[0].to_finish.message
    assert reqs[1].to_finish is None


def test_seeds_that_are_not_given_depend_on_the_order_alone():
    found = []
    for is_probed in (False, True):
        engine, reqs = ToyEngine(0, seed=5), [make_request(f"r{i}", [1]) for i in range(3)]
        for req in reqs:
            engine.admit(req)
            if is_probed:
                engine.admit(make_request(f"{HEALTH_CHECK_RID_PREFIX}_{req.rid}", [1]))
        found.append([admitted(req).seed for req in reqs])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def test_withheld_drafts_are_not_accepted():
    engine = ToyEngine(K)
    options = {"temperature": 0.8, "sampling_seed": 3, "custom_params": {"mtp_speculate": False}}
    (found,) = engine.serve([make_request("r", [1, 2], **options)], tokens=50)
    assert engine.counts.acceptance_length == 1
    del options["custom_params"]
    assert ToyEngine(K).serve([make_request("r", [1, 2], **options)], tokens=50) == [found]


class Top2(CustomVerification):
    description = "accept a draft among the two most probable tokens of the target"

    def num_accepted(self, logits, draft_tokens, target_tokens):  # noqa: ARG002
        top2 = logits[:, :-1].topk(2, dim=-1).indices
        return (top2 == draft_tokens.unsqueeze(-1)).any(dim=-1).int().cumprod(dim=1).sum(dim=1)


def test_a_request_chooses_a_registered_method():
    options = {"temperature": 0.0}
    register_verification("top2", Top2())
    try:
        lengths = {}
        for method in ("coupled", "top2"):
            engine = ToyEngine(K)
            reqs = [
                make_request(f"r{i}", [i], **options, custom_params={"mtp_verification": method})
                for i in range(4)
            ]
            engine.serve(reqs, tokens=80)
            lengths[method] = engine.counts.acceptance_length
    finally:
        unregister_verification("top2")
    assert lengths["top2"] > lengths["coupled"]
