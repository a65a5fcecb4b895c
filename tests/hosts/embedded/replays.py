"""Graphs for tests: watched ones, and a substitute for machines without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

from mtp_plugin.hosts.embedded import model_engine
from mtp_plugin.hosts.embedded.build import captured_shapes
from mtp_plugin.hosts.embedded.cuda_graphs import CapturedStep, CapturedSteps
from mtp_plugin.hosts.embedded.row_table import StepShape


class EagerReplays(CapturedSteps):
    """A replay launches the captured step again, over the tensors that a graph would read.

    Rows, store and speculative metadata are those of the capture, as in a graph: what the host does
    not bring to them never reaches the step.
    """

    def _record(self, launch, spec_metadata) -> CapturedStep:
        outputs = launch()
        outputs.pop("logits")

        def replay() -> None:
            for name, value in launch().items():
                if name == "verified":
                    outputs[name] = value
                elif name in outputs:
                    outputs[name].copy_(value)

        return CapturedStep(SimpleNamespace(replay=replay), outputs, spec_metadata, [])


class WatchedGraphs:
    """An executor with graphs, real or substitutes, and what became of each of its steps."""

    def __init__(self, llm, monkeypatch) -> None:
        self.llm = llm
        self.replayed: list[StepShape] = []
        self.eager: list[StepShape] = []
        engine = llm.executor.engine
        if engine.captured is None:
            with monkeypatch.context() as patch:
                patch.setattr(model_engine, "CapturedSteps", EagerReplays)
                graphs = llm.config.cuda_graph_config
                shapes = captured_shapes(llm.config, llm.pieces, llm.attn_backend)
                engine.capture(shapes, lambda _: None, lazy=graphs.capture == "lazy")
        self.captured = engine.captured
        replay = self.captured.replay

        def note(shape, *args):
            outputs = replay(shape, *args)
            (self.eager if outputs is None else self.replayed).append(shape)
            return outputs

        self.captured.replay = note

    @property
    def eager_generations(self) -> list[StepShape]:
        """Eager steps that a graph might have served: those without contexts."""
        return [shape for shape in self.eager if not shape.chunk_lens]

    def generate(self, prompts, params) -> list[list[int]]:
        return [output.token_ids for output in self.llm.generate(prompts, params)]
