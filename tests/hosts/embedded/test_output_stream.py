"""`LLM.generate_async(..., streaming=True)`: partial outputs as in TensorRT-LLM."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine

import pytest

from mtp_plugin.errors import ExecutorError, RequestError
from mtp_plugin.hosts.embedded import LLM, RequestOutput
from mtp_plugin.hosts.embedded.handle import GenerationHandle
from mtp_plugin.hosts.embedded.outputs import CompletionOutput
from tests.hosts.embedded.conftest import assert_drained
from tests.hosts.embedded.test_llm_api import Pieces, greedy


async def partial_outputs(llm: LLM, prompt, params) -> list[RequestOutput]:
    return [output async for output in llm.generate_async(prompt, params, streaming=True)]


def plain(completion: CompletionOutput) -> CompletionOutput:
    names = [each.name for each in dataclasses.fields(CompletionOutput)]
    return CompletionOutput(**{name: getattr(completion, name) for name in names})


@pytest.mark.parametrize("options", [{}, {"n": 3, "temperature": 1.0, "seed": 5}])
def test_partial_outputs_grow_to_the_output_of_generate(harness, options) -> None:
    llm = harness.llm(tokenizer=Pieces())
    params = greedy(20, logprobs=2, prompt_logprobs=1, **options)
    (expected,) = llm.generate([[4, 5]], params)
    outputs = asyncio.run(partial_outputs(llm, [4, 5], params))
    assert len(outputs) > 2
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(params.n):
        texts, tokens = "", []
        for output in outputs:
            sequence = output.outputs[index]
            texts += sequence.text_diff
            tokens = tokens + sequence.token_ids_diff
            assert (sequence.text, sequence.token_ids) == (texts, tokens)
            assert len(sequence.logprobs or ()) == len(tokens)
    assert outputs[0].prompt_token_ids == [4, 5]
    assert outputs[0].prompt_logprobs == expected.prompt_logprobs
    assert outputs[0].outputs[0].finish_reason is None
    last = dataclasses.replace(outputs[-1], outputs=[plain(each) for each in outputs[-1].outputs])
    assert last == dataclasses.replace(expected, request_id=last.request_id)
    assert_drained(llm)


def test_a_stream_is_awaited_or_waited_for(harness, target, prompts) -> None:
    llm = harness.llm()

    async def main() -> list[int]:
        stream = llm.generate_async(prompts[3], greedy(), streaming=True)
        await anext(stream)
        assert (await stream).token_ids == (await stream).token_ids
        return (await llm.generate_async(prompts[3], greedy(), streaming=True)).token_ids

    assert asyncio.run(main()) == target.greedy(prompts[3], 12)
    stream = llm.generate_async(prompts[4], greedy(), streaming=True)
    assert isinstance(stream, GenerationHandle)
    assert stream.result().token_ids == target.greedy(prompts[4], 12)
    assert_drained(llm)


def test_generate_async_is_a_coroutine_and_a_handle(harness, target, prompts) -> None:
    llm = harness.llm()
    handle = llm.generate_async(prompts[3], greedy())
    assert isinstance(handle, Coroutine)
    assert handle.result().finished

    async def main() -> list[RequestOutput]:
        outputs = [output async for output in llm.generate_async(prompts[3], greedy())]
        assert len(outputs) == 1
        outputs.append(await asyncio.create_task(llm.generate_async(prompts[3], greedy())))
        outputs.append(await llm.generate_async(prompts[3], greedy()).aresult())
        return [*outputs, await llm.submit(prompts[3], greedy()).aresult(), await handle]

    outputs = asyncio.run(main())
    assert [output.token_ids for output in outputs] == [target.greedy(prompts[3], 12)] * 5
    assert_drained(llm)


def test_a_read_that_times_out_loses_no_tokens(harness, target, prompts) -> None:
    llm = harness.llm()

    async def main() -> list[list[int]]:
        stream = llm.generate_async(prompts[3], greedy(), streaming=True)
        for _ in range(3):
            read = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            read.cancel()
            await asyncio.wait([read])
            assert read.cancelled()
        return [output.outputs[0].token_ids_diff async for output in stream]

    parts = asyncio.run(main())
    assert [token for part in parts for token in part] == target.greedy(prompts[3], 12)
    assert_drained(llm)


def test_two_readers_share_the_partial_outputs(harness, target, prompts) -> None:
    llm = harness.llm()

    async def main() -> list[list[RequestOutput]]:
        stream = llm.generate_async(prompts[3], greedy(), streaming=True)

        async def read() -> list[RequestOutput]:
            return [output async for output in stream]

        return await asyncio.gather(read(), read())

    outputs = [output for outputs in asyncio.run(main()) for output in outputs]
    outputs.sort(key=lambda output: len(output.token_ids))
    tokens = [token for output in outputs for token in output.outputs[0].token_ids_diff]
    assert tokens == outputs[-1].token_ids == target.greedy(prompts[3], 12)
    assert_drained(llm)


def test_errors_of_a_stream(harness, prompts) -> None:
    llm = harness.llm()
    with pytest.raises(RequestError, match="ids must be integers"):
        llm.generate_async([-1], streaming=True)
    with pytest.raises(RequestError, match="got \\['a', 'b'\\]; call it for each text"):
        llm.generate_async(["a", "b"], streaming=True)

    async def main() -> None:
        stream = llm.generate_async(prompts[3], greedy(90), streaming=True)
        await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        async for _ in stream:
            pass

    with pytest.raises(ExecutorError, match="shut down"):
        asyncio.run(main())


def test_names_of_other_engines_name_their_counterpart(harness) -> None:
    llm = harness.llm()
    with pytest.raises(AttributeError, match=r"'get_stats'; use `LLM.get_metrics\(\)`"):
        llm.get_stats()
    with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'generat'$"):
        llm.generat()
    assert not hasattr(llm, "embed")
