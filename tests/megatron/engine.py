"""A small GPT model with three MTP layers in Megatron's own dynamic engine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

VOCAB = 64
MTP_LAYERS = 3
BLOCK_SIZE = 16
PROMPTS = ([5, 9, 12, 44], [7] * 19, [3, 1, 4, 1, 5, 9, 2, 6], [60, 50, 25])


def initialize(device: str = "cpu") -> None:
    """Import Megatron, on the CPU with substitutes for CUDA, and start its process groups."""
    if device == "cpu":
        from tests.megatron import cpu_substitutes

        cpu_substitutes.replace_cuda()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(29000 + os.getpid() % 1000))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.inference.engines import dynamic_engine  # noqa: F401

        if device == "cpu":
            cpu_substitutes.replace_kernels_of_megatron()
        backend = "gloo" if device == "cpu" else "nccl"
        torch.distributed.init_process_group(backend, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        if device != "cpu":
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(0)


class Tokenizer:
    """Texts are token ids in decimal."""

    vocab_size = VOCAB
    eod = VOCAB - 1
    bos = 0

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(str(int(token)) for token in ids)

    def offsets(self, ids: Sequence[int], _text: str) -> list[int]:
        starts = [0]
        for token in ids:
            starts.append(starts[-1] + len(str(int(token))) + 1)
        return starts[:-1]


def make_model(
    device: str = "cpu", dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Any]:
    """Return a model whose drafts are accepted sometimes at every position, and its config.

    Embeddings are one-hot, so the logits are a table by the last token, plus a little of the
    decoder's attention: output depends on the KV cache. The MTP layers hold the same table with a
    quarter of its rows exchanged, other rows in every layer.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=VOCAB,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=128,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=MTP_LAYERS,
        init_method_std=0.15,
        inference_sampling_seed=1234,
        **options,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=256,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False),
    ).eval()
    exchanged = torch.randperm(VOCAB)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "word_embeddings" in name:
                weight.copy_(torch.eye(VOCAB))
            elif "output_layer" in name:
                weight.normal_(std=0.5)
            elif "linear_fc2" in name or ("linear_proj" in name and "mtp" in name):
                weight.zero_()
            elif "linear_proj" in name:
                weight.mul_(0.1)
            elif "eh_proj" in name:
                layer = int(name.split("layers.")[1].split(".")[0])
                rows = exchanged[layer * VOCAB // 4 : (layer + 1) * VOCAB // 4]
                table = torch.eye(VOCAB)
                table[:, rows] = table[:, rows.roll(1)]
                weight.zero_()
                weight[:, :VOCAB] = table
    return (model if device == "cpu" else model.cuda()), config


@dataclass
class Run:
    """Result of `generate`."""

    tokens: list[list[int]]
    proposed: list[int]
    accepted: list[int]
    """Accepted drafts by position."""
    steps: int
    requests: list[Any] = field(repr=False)


def make_engine(model: Any, config: Any, num_drafts: int, **options: Any) -> Any:
    """Return a dynamic engine with ``num_drafts`` speculative tokens."""
    from megatron.core.inference.config import InferenceConfig
    from megatron.core.inference.contexts import DynamicInferenceContext
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    defaults = {
        "block_size_tokens": BLOCK_SIZE,
        "buffer_size_gb": 0.05,
        "max_requests": 8,
        "max_tokens": 256,
        "max_sequence_length": 256,
        "num_speculative_tokens": num_drafts,
        "unified_memory_level": 0,
    }
    context = DynamicInferenceContext(config, InferenceConfig(**{**defaults, **options}))
    wrapped = GPTInferenceWrapper(model, context)
    controller = text_generation_controller.TextGenerationController(wrapped, Tokenizer())
    return DynamicInferenceEngine(controller, context)


def generate(
    engine: Any,
    params: Any,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    arrivals: Sequence[int] | None = None,
) -> Run:
    """Run prompts to the end; prompt i is submitted before step ``arrivals[i]`` (default: 0)."""
    arrivals = arrivals or [0] * len(prompts)
    records, step = [], 0
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while engine.has_unfinished_requests() or step <= max(arrivals):
            for number, prompt in enumerate(prompts):
                if arrivals[number] == step:
                    own = params[number] if isinstance(params, list) else params
                    engine.add_request(number, " ".join(map(str, prompt)), own)
            records += engine.step_modern()["finished_request_records"]
            step += 1
    records.sort(key=lambda record: record.request_id)
    requests = [record.merge() for record in records]
    return Run(
        [[int(token) for token in request.generated_tokens] for request in requests],
        engine._spec_tokens_proposed_per_pos.tolist(),
        engine._spec_tokens_accepted_per_pos.tolist(),
        step,
        requests,
    )
