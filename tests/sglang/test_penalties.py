"""Penalties and the minimum of tokens, per position, and custom logit processors."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import sglang.srt.sampling.sampling_batch_info as batch_info
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from integration.sglang import checks
from mtp_plugin.hosts.sglang.engine import Engine
from mtp_plugin.hosts.sglang.options import SglangOptions
from mtp_plugin.infer import decode
from mtp_plugin.ops import Backend, LogitRows, build_slot_rows, sample_tokens
from mtp_plugin.requests.options import SamplingParams as ReferenceParams
from mtp_plugin.speculative.rows.penalties import Penalties
from tests.sglang.test_same_output import TableModel
from tests.sglang.toy_engine import EOS, VOCAB, Batch, K, ToyEngine, make_request

TOKENS = 45
STOPS = {"ignore_eos": False, "stop_token_ids": [3, 11, 20]}
PENALTIES = {
    "repetition": {"repetition_penalty": 1.4},
    "reward": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.6},
    "minimum": {"min_new_tokens": 25, **STOPS},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.5,
        "min_new_tokens": 30,
        **STOPS,
    },
    "none": {},
}
SAMPLING = [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 9}]
SAMPLING.append({"temperature": 0.9, "top_p": 0.9, "min_p": 0.02, "logit_bias": {"4": 1.5}})


def requests(sampling=SAMPLING, penalties=PENALTIES, **more):
    chosen = random.Random(3)
    made = []
    for name, given in penalties.items():
        for number, options in enumerate(sampling):
            prompt = [chosen.randrange(VOCAB) for _ in range(1 + len(made) % 9)]
            options = {**options, **given, **more, "sampling_seed": len(made)}
            made.append(make_request(f"{name}{number}", prompt, **options))
    return made


def outputs(engine, reqs, **options):
    engine.serve(reqs, tokens=TOKENS, **options)
    return [list(req.output_ids_through_stop)[:TOKENS] for req in reqs]


@pytest.fixture(scope="module")
def without_drafts():
    return outputs(ToyEngine(0), requests())


@pytest.mark.parametrize("drafts", [1, K])
def test_drafts_do_not_change_the_output(without_drafts, drafts):
    engine = ToyEngine(drafts)
    assert outputs(engine, requests()) == without_drafts
    assert engine.counts.acceptance_length > 1.3


def test_every_penalty_has_an_effect(without_drafts):
    reqs = requests()
    for req in reqs:
        for name, value in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)):
            setattr(req.sampling_params, f"{name}_penalty", value)
        req.sampling_params.min_new_tokens = 0
    plain = outputs(ToyEngine(0), reqs)
    pairs = zip(reqs, plain, without_drafts, strict=True)
    names = {req.rid[:-1] for req, one, two in pairs if one != two}
    assert names == PENALTIES.keys() - {"none"}


@pytest.mark.parametrize("drafts", [0, 1, K])
def test_retractions_do_not_change_the_output(without_drafts, drafts):
    engine = ToyEngine(drafts, slots=4, chunk=2)
    assert outputs(engine, requests(), retract=0.04) == without_drafts
    assert engine.counts.retractions > 10


def test_the_kernels_do_not_change_the_output():
    def some():
        return requests(SAMPLING[1:2], {name: PENALTIES[name] for name in ("minimum", "all")})

    expected = ToyEngine(0).serve(some(), tokens=8)
    engine = ToyEngine(K, SglangOptions(kernels="triton"))
    assert engine.serve(some(), tokens=8) == expected


def test_random_requests_have_one_output():
    options, rng, count = [], random.Random(8), 60
    for given in checks.random_requests([[]], count, longest=25, grammars=False):
        params = given["sampling_params"]
        for name in ("stop_token_ids", "logit_bias"):  # of a larger vocabulary
            params.pop(name, None)
        for name, low in (("repetition", 0.5), ("presence", -2.0), ("frequency", -2.0)):
            if rng.random() < 0.5:
                params[f"{name}_penalty"] = rng.uniform(low, 2.0)
        if rng.random() < 0.5:
            params["stop_token_ids"] = rng.sample(range(VOCAB), 4)
            params["min_new_tokens"] = rng.randint(0, params["max_new_tokens"])
        options.append(params)

    def found(drafts, chunk, retract):
        prompts = [[i % VOCAB, i % 7, 2, i % 3][: 1 + i % 4] for i in range(count)]
        given = zip(prompts, options, strict=True)
        reqs = [make_request(f"r{i}", prompt, **each) for i, (prompt, each) in enumerate(given)]
        return outputs(ToyEngine(drafts, chunk=chunk), reqs, retract=retract)

    expected = found(0, None, 0.0)
    assert found(1, 2, 0.0) == expected
    assert found(K, 2, 0.05) == expected


# ---- references


def penalized(row, output, options, stops):
    """A row of logits after penalties, rounded to float32 after each step."""
    repetition, presence, frequency = (
        np.float32(options.get(f"{name}_penalty", neutral))
        for name, neutral in (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0))
    )
    values = list(np.asarray(row, dtype=np.float32))
    for token, number in Counter(output).items():
        x = values[token] - presence - frequency * np.float32(number)
        values[token] = x / repetition if x > 0 else x * repetition
    if len(output) < options.get("min_new_tokens", 0):
        for token in stops:
            values[token] = np.float32("-inf")
    return torch.tensor(np.array(values)).unsqueeze(0)


def reference(table, prompt, options, seed):
    """The output of a request, in plain Python but for the sampling of a row."""
    stops = {EOS, *options.get("stop_token_ids", ())}
    output = []
    while len(output) < TOKENS:
        values = penalized(table[[*prompt, *output][-1]], output, options, stops)
        for token, bias in options.get("logit_bias", {}).items():
            values[0, int(token)] += bias
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {name: options[name] for name in names if name in options}
        slots = build_slot_rows([{**given, "seed": seed}], device="cpu")
        rows = LogitRows.flat(torch.tensor([len(prompt) + len(output) - 1]))
        output.append(int(sample_tokens(values, rows, slots, backend=Backend.TORCH)))
        if output[-1] in stops and not options.get("ignore_eos", True):
            break
    return output


def test_the_output_is_that_of_a_plain_reference(without_drafts):
    table = ToyEngine(0).table
    given = [{**options, **each} for each in PENALTIES.values() for options in SAMPLING]
    lengths = set()
    for seed, (req, options, found) in enumerate(
        zip(requests(), given, without_drafts, strict=True)
    ):
        assert reference(table, list(req.origin_input_ids), options, seed) == found, req.rid
        lengths.add(len(found))
    assert len(lengths) > 3  # some end at a stop id


def test_the_output_is_that_of_the_reference_decoder(without_drafts):
    """Whose repetition penalty counts the prompt, too."""
    model = TableModel(ToyEngine(0).table)
    given = [(name, {**one, **each}) for name, each in PENALTIES.items() for one in SAMPLING]
    for seed, (req, (name, options)) in enumerate(zip(requests(), given, strict=True)):
        if "repetition_penalty" in options:
            continue
        options = {"ignore_eos": True, **options}
        if "logit_bias" in options:
            options["logit_bias"] = {int(k): v for k, v in options["logit_bias"].items()}
        options["min_tokens"] = options.pop("min_new_tokens", 0)
        prompt = list(req.origin_input_ids)
        params = ReferenceParams(
            seed=seed, max_tokens=TOKENS, prompt_ignore_length=len(prompt), **options
        )
        assert decode(model, prompt, params, end_ids=(EOS,)).token_ids == without_drafts[seed], name


@pytest.mark.parametrize("sampling", SAMPLING[:2])
def test_log_probabilities_are_those_of_penalized_logits(sampling):
    found, table = [], ToyEngine(0).table
    for drafts in (0, K):
        reqs = requests([sampling], num_logprobs=2)
        ToyEngine(drafts).serve(reqs, tokens=20)
        found.append([req.logprob for req in reqs])
    for plain, drafted in zip(*found, strict=True):
        for name in ("token_logprobs", "top_logprobs"):
            one, two = (getattr(each, f"output_{name}_val")[:15] for each in (plain, drafted))
            torch.testing.assert_close(torch.tensor(one), torch.tensor(two))
    for req, options, logprob in zip(reqs, PENALTIES.values(), found[0], strict=True):
        output, text = list(req.output_ids), [*req.origin_input_ids, *req.output_ids]
        stops = {EOS, *options.get("stop_token_ids", ())}
        for index in range(10):
            row = table[text[len(req.origin_input_ids) + index - 1]]
            values = penalized(row, output[:index], options, stops)[0]
            expected = (values / (sampling["temperature"] or 1.0)).log_softmax(-1)[output[index]]
            value = logprob.output_token_logprobs_val[index]
            assert value == pytest.approx(float(expected), 1e-4)


# ---- defects, counts, memory


def _draft_not_counted(patch):
    """Penalize all rows of a step alike."""
    penalize = Engine._penalize

    def alike(self, logits, drafts, *more):
        penalize(self, logits, torch.full_like(drafts, -1), *more)

    patch.setattr(Engine, "_penalize", alike)


def _prompt_counted(patch):
    stage = Engine.stage

    def with_prompt(self, req):
        own = self._penalties.stage
        self._penalties.stage = lambda slot, output, unused: own(
            slot, [*req.origin_input_ids, *output], unused
        )
        stage(self, req)
        del self._penalties.stage

    patch.setattr(Engine, "stage", with_prompt)


def _rejected_draft_counted(patch):
    count = Penalties.count

    def one_more(self, tokens, counts, slots):
        count(self, tokens, (counts + 1).clamp_max(tokens.shape[1]), slots)

    patch.setattr(Penalties, "count", one_more)


@pytest.mark.parametrize("defect", [_draft_not_counted, _prompt_counted, _rejected_draft_counted])
def test_planted_defects_change_the_output(without_drafts, defect, monkeypatch):
    defect(monkeypatch)
    assert outputs(ToyEngine(K), requests()) != without_drafts


def test_the_token_of_an_unfinished_prompt_is_not_counted():
    engine = ToyEngine(0)
    req = make_request("r", [1, 2], temperature=0.0, presence_penalty=2.0)
    engine.admit(req)
    engine.pool.alloc([req])
    for length, token, counted in ((1, 5, 0), (2, 6, 1)):
        logits = torch.zeros(1, VOCAB)
        logits[0, token] = 9.0
        engine.sample(Batch([req]), logits, torch.tensor([length]), ForwardMode.EXTEND)
        assert engine.engine._penalties._pools.counts[:, token].sum() == counted


def test_sglang_applies_no_penalty_of_its_own():
    engine = ToyEngine(K)
    params = make_request("r", [1], **PENALTIES["all"]).sampling_params
    reqs = requests()
    for req in reqs:
        engine.admit(req)
    given = reqs[0].sampling_params
    assert (given.repetition_penalty, params.repetition_penalty) == (1.0, 1.2)
    engine.pool.alloc(reqs[:6])
    assert not Batch(reqs[:6]).sampling_info.penalizer_orchestrator.is_required


@pytest.mark.parametrize("drafts", [0, K])
def test_requests_without_penalties_launch_nothing_more(drafts, monkeypatch):
    engine = ToyEngine(drafts)
    outputs(engine, requests()[:4])
    for name in ("penalize", "count"):
        monkeypatch.setattr(Penalties, name, None)
    outputs(engine, requests(penalties={"none": {}}))


def test_rows_of_finished_requests_are_used_again():
    engine = ToyEngine(K, slots=50)
    for number in range(60):
        engine.serve([make_request(f"r{number}", [1], presence_penalty=1.0)], tokens=3)
    assert len(engine.engine._penalties._pools.counts) == 1
    many = [make_request(f"m{number}", [1], presence_penalty=1.0) for number in range(40)]
    engine.serve(many, tokens=3)
    assert len(engine.engine._penalties._pools.counts) == 64


def test_too_many_stop_ids_are_refused_by_name():
    engine = ToyEngine(K)
    for count, is_refused in ((31, False), (32, True)):
        stops = [token for token in range(VOCAB) if token != EOS][:count]
        req = make_request("r", [1], min_new_tokens=3, stop_token_ids=stops)
        engine.admit(req)
        assert isinstance(req.to_finish, FINISH_ABORT) == is_refused
    assert req.to_finish.status_code == 400
    assert "min_new_tokens: expected at most 32 ids" in req.to_finish.message
    assert "got 33" in req.to_finish.message


# ---- custom logit processors


class Counting(CustomLogitProcessor):
    """Allows the ids that are congruent to the length of the output."""

    def __call__(self, logits, custom_param_list=None):
        assert len(logits) == len(custom_param_list)
        for row, params in zip(logits, custom_param_list, strict=True):
            length = len(params["__req__"].output_ids)
            row[torch.arange(VOCAB) % 3 != length % 3] = float("-inf")
        return logits


class Forcing(CustomLogitProcessor):
    """Forces one token after each three others."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list, strict=True):
            params.setdefault("calls", []).append(None)
            if len(params["calls"]) % 4 == 0:
                row.fill_(float("-inf"))
                row[params["token"]] = 0.0
        return logits


def processed():
    kinds = [(Counting, {}), (Forcing, {"token": 13}), (Forcing, {"token": 2}), (None, {})]
    made = []
    for number in range(12):
        processor, params = kinds[number % 4]
        options = {**SAMPLING[number % 3], **[{}, {"presence_penalty": 0.8}][number % 2]}
        req = make_request(
            f"r{number}", [number], sampling_seed=number, custom_params=params, **options
        )
        if processor is not None:
            req.custom_logit_processor = processor.to_str()
            req.sampling_params.custom_params = {**params, "__req__": req}
        made.append(req)
    return made


def test_custom_logit_processors_give_one_output(monkeypatch):
    features = SimpleNamespace(enable_custom_logit_processor=True, enable_watermark=False)
    features.enable_deterministic_inference = False
    features = SimpleNamespace(features=features)
    features.deterministic = SimpleNamespace(enable_deterministic_inference=False)
    monkeypatch.setattr(batch_info, "get_exec", lambda: features)
    expected = outputs(ToyEngine(0), processed())
    for drafts in (1, K):
        reqs, engine = processed(), ToyEngine(drafts)
        assert outputs(engine, reqs) == expected
        for req, tokens in zip(reqs, expected, strict=True):
            if req.custom_logit_processor == Counting.to_str():
                assert [token % 3 for token in tokens] == [i % 3 for i in range(TOKENS)]
            elif "token" in req.sampling_params.custom_params:
                assert set(tokens[3::4]) == {req.sampling_params.custom_params["token"]}
        drafted = [req for req in reqs if not req.custom_logit_processor]
        steps = sum(req.spec_verify_ct for req in reqs)
        assert steps == sum(req.spec_verify_ct for req in drafted)  # others count no drafts
        assert 1 < engine.counts.acceptance_length < 1.6
