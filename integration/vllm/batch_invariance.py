"""Equal bits with and without drafts? ``python -m integration.vllm.batch_invariance``.

Runs vLLM with ``VLLM_BATCH_INVARIANT=1``, in bfloat16 and without graphs. Two results: for every
module of the target and the draft model, whether a row's output depends on the number of rows; and
how many requests have equal token ids, and equal bits of log-probabilities, by batch size, number
of drafts and attention backend, before and after the float32 router of the model runs through
vLLM's batch-invariant matrix product.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from integration.vllm.engine_process import (
    EngineError,
    EngineProcess,
    add_common_options,
    engine_settings,
    has_gpu,
    prepare,
)
from integration.vllm.load import text_prompts
from integration.vllm.soak import prompt_texts
from integration.vllm.traffic import model_runner

KINDS = [
    ("FLASH_ATTN", False, False),
    ("FLASH_ATTN", False, True),
    ("TRITON_ATTN", False, False),
    ("FLASH_ATTN", True, False),
    ("FLASH_ATTN", True, True),
]
"""Attention backend, whether with graphs and compiled, whether routers are batch-invariant."""
CPU_KINDS = [("CPU_ATTN", False, False)]
"""A CPU has no batch-invariant mode: a trial of this program."""
ROWS = (1, 2, 4, 8, 16, 64)
"""Numbers of rows that are compared with the most."""
NUM_DRAFTS = 3
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t0.8": {"temperature": 0.8, "top_p": 0.95},
}
SHORT, LONG = 120.0, 300.0


def generate(
    llm: Any, *, prompts: list[list[int]], sampling: dict[str, Any], length: int, first: int = 0
) -> Any:
    """Return ``[ids, bits]`` of every request; bits are those of log-probabilities, as hex."""
    from vllm import SamplingParams

    params = [
        SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, seed=first + i, **sampling)
        for i in range(len(prompts))
    ]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        ids = list(output.outputs[0].token_ids)
        logprobs = zip(output.outputs[0].logprobs, ids, strict=True)
        found.append([ids, [entry[token].logprob.hex() for entry, token in logprobs]])
    return found


def route_gates() -> None:
    """Send every plain linear layer through vLLM's batch-invariant product."""
    import torch
    from vllm.model_executor.layers.batch_invariant import linear_batch_invariant

    def forward(self: Any, x: Any) -> Any:
        return linear_batch_invariant(x, self.weight, self.bias)

    torch.nn.Linear.forward = forward


def compare_modules(llm: Any) -> Any:
    """Return, by kind of module and shape, the numbers of rows with other bits than all rows."""
    import torch
    from vllm.forward_context import set_forward_context

    config = llm.llm_engine.vllm_config
    runner = model_runner(llm)
    models = {"target": runner.model}
    if getattr(runner, "speculator", None) is not None:
        models["draft"] = runner.speculator.model
    calls: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    hooks = []
    for part, model in models.items():
        for name, module in model.named_modules():
            kind = type(module).__name__
            if kind != "Attention" and (not any(module.children()) or "MoE" in kind):
                hook = _keep(calls, f"{part} {name}")
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    generate(llm, prompts=[list(range(100, 100 + max(ROWS)))], sampling={}, length=2)
    for hook in hooks:
        hook.remove()
    for part, model in models.items():
        hidden_size = config.model_config.get_hidden_size()
        hidden = torch.randn(max(ROWS), hidden_size, device=runner.device, dtype=torch.bfloat16)
        calls[f"{part} compute_logits"] = (model.compute_logits, (hidden,), {})
    found: dict[str, Any] = {}
    for name, (module, args, kwargs) in calls.items():
        key = f"{name.split()[0]} {type(module).__name__} {_shapes(args, kwargs)}"
        if key in found:
            continue
        try:
            with torch.inference_mode(), set_forward_context(None, config, num_tokens=max(ROWS)):
                whole = _bits(module, args, kwargs, max(ROWS))
                differ = [
                    rows
                    for rows in ROWS[:-1]
                    if _bits(module, args, kwargs, rows) != [row[:rows] for row in whole]
                ]
            found[key] = {"module": name, "rows_that_differ": differ}
        except Exception as error:  # a module that needs attention metadata, for example
            found[key] = {"module": name, "not_run": f"{type(error).__name__}: {error}"[:200]}
    return found


def _keep(calls: dict[str, Any], name: str) -> Any:
    import torch

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        if name not in calls and tensors and tensors[0].shape[0] == max(ROWS):
            copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
            named = {k: x.clone() if isinstance(x, torch.Tensor) else x for k, x in kwargs.items()}
            calls[name] = (module, tuple(copies), named)

    return hook


def _shapes(args: Any, kwargs: Any) -> str:
    import torch

    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    return " ".join(f"{list(x.shape)} {str(x.dtype)[6:]}" for x in tensors)


def _bits(module: Any, args: Any, kwargs: Any, rows: int) -> list[list[bytes]]:
    """Return the bytes of every row of every output, for the first ``rows`` rows of the input."""
    import torch

    def cut(x: Any) -> Any:
        is_rows = isinstance(x, torch.Tensor) and x.shape[:1] == (max(ROWS),)
        return x[:rows].clone() if is_rows else x

    result = module(*map(cut, args), **{name: cut(x) for name, x in kwargs.items()})
    results = result if isinstance(result, (tuple, list)) else (result,)
    return [
        [row.tobytes() for row in x.contiguous().view(torch.uint8).cpu().numpy()]
        for x in results
        if isinstance(x, torch.Tensor)
    ]


def compare_attention(llm: Any) -> Any:
    """Return which calls of flash attention give a last row with other bits than query length 4."""
    import torch
    from vllm.v1.attention.backends.fa_utils import (
        flash_attn_varlen_func,
        get_flash_attn_version,
    )

    torch.manual_seed(0)
    device = llm.llm_engine.vllm_config.device_config.device
    heads, kv_heads, size, batch, context = 32, 8, 128, 64, 300
    blocks = -(-context // 16)
    keys, values = (
        torch.randn(batch * blocks, 16, kv_heads, size, device=device, dtype=torch.bfloat16)
        for _ in range(2)
    )
    table = torch.arange(batch * blocks, device=device, dtype=torch.int32).view(batch, blocks)
    queries = torch.randn(batch, 4, heads, size, device=device, dtype=torch.bfloat16)
    found, results = {}, {}
    for requests, length in ((64, 4), (64, 1), (1, 4), (1, 1)):
        q = queries[:requests, 4 - length :].reshape(-1, heads, size)
        starts = torch.arange(requests + 1, device=device, dtype=torch.int32) * length
        out = flash_attn_varlen_func(
            q, keys, values, max_seqlen_q=length, cu_seqlens_q=starts, max_seqlen_k=context,
            seqused_k=torch.full((requests,), context, device=device, dtype=torch.int32),
            softmax_scale=size**-0.5, causal=True, block_table=table[:requests], num_splits=1,
            fa_version=get_flash_attn_version(),
        )  # fmt: skip
        results[requests, length] = out.view(requests, length, heads, size)[:, -1]
        same = torch.equal(results[requests, length], results[64, 4][:requests])
        found[f"{requests} requests, query length {length}"] = same
    return found


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all engines; returns the results and problems."""
    on_gpu = has_gpu()
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(on_gpu))
    prepare(folder, on_gpu)
    kinds = KINDS if on_gpu else CPU_KINDS
    engines = {
        (*kind, k): EngineProcess(
            f"{kind[0]}-graphs{kind[1]:d}-routed{kind[2]:d}-k{k}",
            engine_settings(
                k, on_gpu, {}, dtype="bfloat16", enforce_eager=not kind[1],
                attention_backend=kind[0], max_num_seqs=options.batch,
            ),
            folder,
            in_process=True,
            before=route_gates if kind[2] else None,
        )
        for kind in kinds
        for k in (0, NUM_DRAFTS)
    }  # fmt: skip
    found: dict[str, Any] = {"modules": {}, "attention": {}, "requests": [], "problems": []}
    for key, engine in list(engines.items()):
        try:
            found["engine"] = engine.wait_until_ready()
        except EngineError as error:
            found["problems"].append(str(error))
            engines.pop(key).close()
    try:
        for kind in kinds:
            if {(*kind, 0), (*kind, NUM_DRAFTS)} <= engines.keys():
                _compare(options, kind, *(engines[(*kind, k)] for k in (0, NUM_DRAFTS)), found)
    except EngineError as error:
        found["problems"].append(str(error))
    finally:
        for engine in engines.values():
            engine.close()
    return found


def _compare(
    options: argparse.Namespace,
    kind: tuple[str, bool, bool],
    plain: EngineProcess,
    drafts: EngineProcess,
    found: Any,
) -> None:
    backend, has_graphs, is_routed = kind
    name = (
        f"{backend}, {'graphs' if has_graphs else 'eager'}, {'routed' if is_routed else 'as it is'}"
    )
    prompts = plain.call(text_prompts, SHORT, texts=prompt_texts(), count=options.batch, length=64)
    if not has_graphs:
        found["modules"][name] = drafts.call(compare_modules, SHORT)
    if backend == "FLASH_ATTN" and not found["attention"]:
        found["attention"] = drafts.call(compare_attention, SHORT)
    many = options.batch
    for label, sampling in SAMPLING.items():
        arguments = {"sampling": sampling, "length": options.osl}
        outputs = {
            (k, batch): [
                output
                for start in range(0, many if batch > 1 else 8, batch)
                for output in engine.call(
                    generate,
                    LONG,
                    prompts=prompts[start : start + batch],
                    first=start,
                    **arguments,
                )
            ]
            for k, engine in ((0, plain), (NUM_DRAFTS, drafts))
            for batch in (1, many)
        }
        for one, other in (
            ((NUM_DRAFTS, many), (0, many)),
            ((NUM_DRAFTS, 1), (0, 1)),
            ((0, 1), (0, many)),
        ):
            pairs = list(zip(outputs[one], outputs[other], strict=False))
            found["requests"].append(
                {
                    "engines": name,
                    "sampling": label,
                    "one": f"K = {one[0]}, batch {one[1]}",
                    "other": f"K = {other[0]}, batch {other[1]}",
                    "compared": len(pairs),
                    "equal_ids": sum(a[0] == b[0] for a, b in pairs),
                    "equal_bits": sum(a == b for a, b in pairs),
                }
            )


def main() -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--osl", type=int, default=64)
    add_common_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        found = measure(options, options.folder or Path(temporary))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for engine, modules in found["modules"].items():
        for key, result in modules.items():
            if result.get("rows_that_differ", True):
                sys.stdout.write(f"{engine}: {key}: {result}\n")
    sys.stdout.write(f"attention: {found['attention']}\n")
    for row in found["requests"]:
        sys.stdout.write(" ".join(f"{name} {value};" for name, value in row.items()) + "\n")
    for problem in found["problems"]:
        sys.stdout.write(f"problem: {problem}\n")
    return 1 if found["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
