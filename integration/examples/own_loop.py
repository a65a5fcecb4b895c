"""A decoding loop of one's own: a transformers model, dynamic caches, and the plugin's components.

``python -m integration.examples.own_loop CHECKPOINT`` decodes two prompts in one batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache

from mtp_plugin import HostFacts, MTPDecodingConfig, SamplingParams, find_plugin
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from mtp_plugin.plugin import PlainAttentionMetadata, PlainBatch, PlainRequest


class CachedAttention(PlainAttentionMetadata):
    """The lengths of a step, and the dynamic caches of its requests as a transformers cache."""

    def __init__(self, batch: PlainBatch, device: torch.device, caches: list[Any]) -> None:
        super().__init__(batch, device)
        self.caches = caches

    def model_kwargs(self) -> dict[str, Any]:
        """Arguments of transformers' layers, with a causal mask per request."""
        lens = zip(self.seq_lens.tolist(), self.kv_lens_cuda.tolist(), strict=True)
        mask = torch.block_diag(*[torch.ones(n, length).tril(length - n) for n, length in lens])
        mask = mask.bool().to(self.kv_lens_cuda.device)[None, None]
        return {"past_key_values": self, "attention_mask": mask, "use_cache": True}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Overwrite from each row's position on; return the keys and values of all requests.

        Args:
            keys, values: [1, heads, T, head_dim].
        """
        lens, held = self.seq_lens.tolist(), []
        rows = zip(keys.split(lens, dim=2), values.split(lens, dim=2), strict=True)
        for cache, length, new in zip(self.caches, self.kv_lens_cuda.tolist(), rows, strict=True):
            past = length - new[0].shape[2]
            for layer in cache.layers[layer_idx : layer_idx + 1]:
                layer.crop(min(0, past - layer.get_seq_length()))
            held.append(cache.update(*new, layer_idx))
        return torch.cat([k for k, _ in held], dim=2), torch.cat([v for _, v in held], dim=2)


class OwnLoop:
    """Draft K tokens per step: with one MTP layer per draft (vanilla) or with the first (eagle)."""

    def __init__(self, model: LoadedModel, k: int, *, vanilla: bool, max_batch_size: int) -> None:
        facts, plugin = model.facts, find_plugin("MTP")
        self.model, self.device = model, model.target.device
        self.host = HostFacts(
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            dtype=model.target.dtype,
            device=self.device,
            max_batch_size=max_batch_size,
            max_num_sequences=max_batch_size,
            max_seq_len=facts.max_position_embeddings,
            chain=model.traits.chain,
        )
        config = MTPDecodingConfig(max_draft_len=k, use_mtp_vanilla=vanilla)
        self.components = plugin.build(config, plugin.plan(config, facts.num_mtp_layers), self.host)
        self.metadata = self.components.make_metadata()
        self.caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def step(self, contexts: list[PlainRequest], generations: list[PlainRequest]) -> None:
        """Run the prompts of ``contexts`` and the last token and K drafts of ``generations``."""
        batch, spec, model = PlainBatch(contexts, generations), self.metadata, self.model
        self.components.manager.prepare_resources(batch)
        spec.request_ids = batch.request_ids
        spec.num_generations = len(generations)
        spec.num_tokens = sum(batch.seq_lens)
        spec.draft_tokens = batch.draft_tokens(self.device)
        spec.prepare()
        caches = [self.caches.setdefault(i, DynamicCache()) for i in batch.request_ids]
        attention = CachedAttention(batch, self.device, caches)
        ids, positions = batch.input_ids(self.device), batch.position_ids(self.device)
        states = model.forward_target(ids, positions, attention)
        outputs = self.components.worker(
            input_ids=ids,
            position_ids=positions,
            hidden_states=states,
            logits=model.lm_head(states[batch.logit_rows(self.device)]),
            lm_head=model.lm_head,
            embed_tokens=model.embed_tokens,
            mtp_layers=model.mtp_layers,
            attn_metadata=attention,
            spec_metadata=spec,
        )
        results = self.components.sampler.sample_async(batch, outputs)
        for request in contexts:
            request.move_to_next_context_chunk()
        self.components.sampler.update_requests(results)

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[PlainRequest]:
        """Continue every prompt, as many at a time as a batch holds."""
        host, end_ids = self.host, self.model.facts.eos_token_ids
        requests = [
            PlainRequest(
                number,
                ids,
                params,
                max_seq_len=host.max_seq_len,
                vocab_size=host.vocab_size,
                end_ids=end_ids,
            )
            for number, ids in enumerate(prompts)
        ]
        waiting, running = requests, list[PlainRequest]()
        while waiting or running:
            rows = set(range(host.max_num_sequences)) - {r.py_seq_slot for r in running}
            contexts, waiting = waiting[: len(rows)], waiting[len(rows) :]
            for request in contexts:
                request.py_seq_slot = rows.pop()
            self.step(contexts, running)
            running = contexts + running
            for request in [r for r in running if r.is_finished]:
                running.remove(request)
                self.components.manager.free_resources(request)
                del self.caches[request.request_id]
        return requests


def main(checkpoint: str) -> None:
    """Decode two prompts with either worker."""
    model, tokenizer = load_model(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    prompts = [tokenizer.encode(text) for text in ("def read_file(path):\n", "import os\n")]
    for vanilla in (False, True):
        loop = OwnLoop(model, 3, vanilla=vanilla, max_batch_size=2)
        for request in loop.generate(prompts, SamplingParams(max_tokens=24)):
            text, steps = tokenizer.decode(request.output_token_ids), request.py_decoding_iter
            sys.stdout.write(f"{steps} steps: {text!r}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
