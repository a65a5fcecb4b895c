"""Measure a checkpoint on the held-out files; writes `report.json`.

python -m integration.tiny_model.evaluate [--corpus DIR] [--out DIR] [--prompts N] [--windows N]

Everything is computed in float32 from the checkpoint's bfloat16 weights. Small values of
`--prompts` and `--windows` make it a matter of a minute on a CPU.
"""

import argparse
import json
import logging
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from integration.tiny_model.corpus import default_corpus, read_manifest, read_texts
from integration.tiny_model.drafting import dense_masks, draft_states
from integration.tiny_model.export import load_checkpoint
from integration.tiny_model.model import TinyMtpModel
from integration.tiny_model.tokenizer import encode_documents, load_tokenizer
from mtp_plugin import LLM, SamplingParams

HERE = Path(__file__).parent
LOG = logging.getLogger("evaluate")

NUM_DRAFTS = 3
REPEAT_LENGTH = 8
SECTIONS = ("teacher_forced", "free_running", "free_running_sampled")
DRAFTINGS: dict[str, dict[str, Any]] = {
    "eagle": {},
    **{
        f"vanilla, chain: {chain}, draft_window: {window}": {
            "use_mtp_vanilla": True,
            "chain": chain,
            "draft_window": window,
        }
        for window in ("exact", "trtllm")
        for chain in ("output", "target_shift")
    },
}
DRAFTS_TEACHER_FORCED = ("vanilla (chain: output)", "eagle (layer 1 reused)")


@torch.no_grad()
def teacher_forced(
    model: TinyMtpModel, stream: Tensor, rows: int, num_windows: int, batch_size: int = 16
) -> dict[str, Any]:
    """Losses, agreement with the target and overlap min(p, q) per depth, on known text.

    Depth k at row i is compared with the target at row i+k: both know the tokens up to i+k.
    """
    depths = len(model.mtp)
    length = rows + depths + 1
    cut = stream.unfold(0, length, length)
    cut = cut[torch.linspace(0, len(cut) - 1, min(num_windows, len(cut))).long().to(cut.device)]
    masks = dense_masks(rows, depths, stream.device)
    main = torch.zeros(2, dtype=torch.double)
    drafts = torch.zeros(2, depths, 3, dtype=torch.double)
    # expected tokens per step: greedy, and at temperature 1
    expected = torch.ones(2, 2, dtype=torch.double)
    for window in cut.split(batch_size):
        # the target also runs on the last rows that the depths are compared with
        states = model.states(window[:, : rows + depths])
        log_p = model.lm_head(states).log_softmax(-1)
        part = len(window) / len(cut)
        main += part * torch.stack(_loss_and_hits(log_p[:, :rows], window[:, 1 : rows + 1]))
        outputs = draft_states(model, window, states[:, :rows], masks)
        for way, way_outputs in enumerate((outputs.chained, outputs.reused)):
            all_so_far = torch.ones((2, 1, 1), dtype=torch.double, device=window.device)
            for index, output in enumerate(way_outputs):
                target = log_p[:, index + 1 : index + 1 + rows]
                labels = window[:, index + 2 : index + 2 + rows]
                log_q = model.lm_head(output).log_softmax(-1)
                loss, _ = _loss_and_hits(log_q, labels)
                agreement = (log_q.argmax(-1) == target.argmax(-1)).double()
                overlap = torch.minimum(log_q.exp(), target.exp()).sum(-1).double()
                all_so_far = all_so_far * torch.stack([agreement, overlap])
                expected[way] += part * all_so_far.mean((1, 2)).cpu()
                figures = (loss, agreement.mean().cpu(), overlap.mean().cpu())
                drafts[way, index] += part * torch.stack(figures)
    columns = ("loss", "top1_agreement", "overlap_at_temperature_1")
    return {
        "rows_per_window": rows,
        "windows": len(cut),
        "main": {"loss": _round(main[0]), "next_token_accuracy": _round(main[1])},
        **{
            name: {
                **{
                    column: [_round(x) for x in drafts[way, :, place]]
                    for place, column in enumerate(columns)
                },
                "expected_tokens_per_step": {
                    "greedy": _round(expected[way, 0]),
                    "at_temperature_1": _round(expected[way, 1]),
                },
            }
            for way, name in enumerate(DRAFTS_TEACHER_FORCED)
        },
    }


def _loss_and_hits(log_p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = -log_p.gather(-1, labels.unsqueeze(-1)).double().mean()
    return loss.cpu(), (log_p.argmax(-1) == labels).double().mean().cpu()


def sample_prompts(
    documents: list[list[int]], count: int, length: int, seed: int
) -> list[list[int]]:
    """Snippets of `length` tokens at random places of the documents, by their share of tokens."""
    long_enough = [document for document in documents if len(document) > 2 * length]
    chooser = random.Random(seed)
    chosen = chooser.choices(long_enough, weights=list(map(len, long_enough)), k=count)
    starts = [chooser.randrange(len(document) - length) for document in chosen]
    return [doc[start : start + length] for doc, start in zip(chosen, starts, strict=True)]


def repeated_share(prompt: list[int], output: list[int]) -> float:
    """Share of generated 8-grams that occurred before in the text."""
    tokens, repeated = prompt + output, 0
    seen: set[tuple[int, ...]] = set()
    for start in range(len(tokens) - REPEAT_LENGTH + 1):
        gram = tuple(tokens[start : start + REPEAT_LENGTH])
        repeated += start >= len(prompt) and gram in seen
        seen.add(gram)
    return repeated / max(len(output) - REPEAT_LENGTH + 1, 1)


def free_running(
    checkpoint: Path, prompts: list[list[int]], new_tokens: int, *, temperature: float = 0.0
) -> dict[str, Any]:
    """Acceptance of the executor's drafts, K = 3: greedy, or sampled and verified by rejection."""
    ways = {}
    for name, way in DRAFTINGS.items() if not temperature else tuple(DRAFTINGS.items())[:2]:
        mtp = {key: value for key, value in way.items() if key != "use_mtp_vanilla"}
        config = {
            "model": str(checkpoint),
            "dtype": "float32",
            "max_batch_size": len(prompts),
            "max_num_tokens": max(4 * len(prompts), 2048),
            "speculative_config": {
                "decoding_type": "MTP",
                "max_draft_len": NUM_DRAFTS,
                "use_mtp_vanilla": way.get("use_mtp_vanilla", False),
                "mtp": mtp | ({"verification": "rejection"} if temperature else {}),
            },
        }
        params = SamplingParams(max_tokens=new_tokens, temperature=temperature)
        with LLM(config) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = llm.executor.acceptance
        rates = found.per_position
        shares = [repeated_share(p, o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
        ways[name] = {
            "acceptance_length": _round(found.acceptance_length),
            "acceptance_per_position": [_round(rate) for rate in rates],
            "conditional_acceptance": [
                _round(rate / max(before, 1e-9))
                for rate, before in zip(rates, [1.0, *rates], strict=False)
            ],
            "steps": found.steps,
            "share_of_repeated_8_grams": _round(sum(shares) / len(shares)),
        }
        LOG.info("%s: %s", name, ways[name])
    return {
        "prompts": len(prompts),
        "prompt_tokens": len(prompts[0]),
        "new_tokens": new_tokens,
        "num_drafts": NUM_DRAFTS,
        "drafting": ways,
    }


def _round(value: float | Tensor) -> float:
    return round(float(value), 4)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the sections that `args` selects, for one checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    manifest = read_manifest(args.manifest)
    tokenizer = load_tokenizer(args.checkpoint)
    texts = read_texts(args.corpus, manifest.of_split("held_out"))
    documents = encode_documents(tokenizer, texts)
    stream = torch.tensor([token for document in documents for token in document], device=device)
    model = load_checkpoint(args.checkpoint).to(device)
    prompts = sample_prompts(documents, args.prompts, args.prompt_tokens, args.seed)
    measures = {
        "teacher_forced": lambda: teacher_forced(model, stream, args.rows, args.windows),
        "free_running": lambda: free_running(args.checkpoint, prompts, args.new_tokens),
        "free_running_sampled": lambda: free_running(
            args.checkpoint, prompts, args.new_tokens, temperature=1.0
        ),
    }
    setting = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "seed": args.seed,
        "held_out_files": len(documents),
        "held_out_tokens": len(stream),
    }
    return {name: {**setting, **measures[name]()} for name in args.sections}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=default_corpus())
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.json")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--windows", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    path = args.out / "report.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    report["evaluation"] = {**report.get("evaluation", {}), **evaluate(args)}
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
