"""Routing of MoE layers by random numbers, in place of the router of a model with dummy weights.

The time of a step depends on how many experts its rows use. Rows of one request follow each other
in a text and share experts, which random weights do not show. `register` replaces the router by
vLLM's own routing simulator, in the processes of a benchmark's engine alone. In each step and layer
the device chooses one of `NUM_TABLES` tables: two launches a layer, which CUDA graphs can hold.
"""

from __future__ import annotations

import os
from typing import Any

import torch

NAME, VARIABLE = "mtp_plugin_benchmark", "MTP_PLUGIN_BENCHMARK_ROUTING"
PLUGIN = {NAME: "integration.vllm.routing:register"}
ROUTINGS: dict[str, float | None] = {"third": 1 / 3, "random": None}
"""Share of a row's experts that the row before it in the same request uses too, the likely case;
None: as many as two independent rows have in common by chance, a bound."""
NUM_TABLES = 64
MOST_ROWS, MOST_CHAIN = 1024, 1 << 14
"""Rows of a step that only generates, and of one with prompts, at most."""
Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Expert ids [NUM_TABLES, rows, top_k] int32, weights [rows, top_k], index of a table [1]."""


def sample_experts(
    shape: tuple[int, int, int],
    rows_per_request: int,
    num_experts: int,
    share: float | None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return expert ids [tables, rows, top_k], int32; those of a row differ from each other.

    Expert j of a row is one of `num_experts / top_k` experts of group j, all equally probable. It
    is that of the row before, or sampled anew.

    Args:
        shape: number of tables, rows and top_k.
        rows_per_request: the first of so many rows shares experts by chance alone.
        share: see `ROUTINGS`.

    Raises:
        ValueError: `num_experts` is not a multiple of `top_k`, or `share` is less than chance.
    """
    _, num_rows, top_k = shape
    chance = top_k / num_experts
    share = chance if share is None else share
    if num_experts % top_k or share < chance:
        raise ValueError(
            f"expected a multiple of {top_k} experts and a share of at least {chance:.3f}, got "
            f"{num_experts} and {share:.3f}"
        )
    sampled = torch.randint(num_experts // top_k, shape, device=device)
    is_kept = torch.rand(shape, device=device) < (share - chance) / (1 - chance)
    is_kept[:, ::rows_per_request] = False
    rows = torch.arange(num_rows, device=device).view(1, -1, 1)
    sources = torch.where(is_kept, 0, rows).cummax(1).values
    first = torch.arange(top_k, device=device) * (num_experts // top_k)
    return (sampled.gather(1, sources) + first).int()


class Routing:
    """Tables by rows of a step and rows of a request."""

    def __init__(self, name: str) -> None:
        self.share = ROUTINGS[name]
        self.tables: dict[tuple[int, ...], Table] = {}

    def change(self, name: str) -> None:
        """Write the tables of another routing into the memory that graphs read."""
        if self.share == ROUTINGS[name]:
            return
        self.share = ROUTINGS[name]
        for key, (ids, _, _) in self.tables.items():
            ids.copy_(self._table(key, ids.device)[0])

    def route(
        self, router_logits: torch.Tensor, top_k: int, rows_per_request: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and expert ids [rows, top_k].

        Args:
            router_logits: [rows, experts]; their values are not read.
            rows_per_request: None or more than `MOST_ROWS` rows: all rows are one request.
        """
        rows, num_experts = router_logits.shape
        if rows_per_request is None or rows > MOST_ROWS or rows % rows_per_request:
            num_rows = rows_per_request = MOST_CHAIN
        else:
            num_rows = rows
        if rows > num_rows:
            raise ValueError(f"routing: expected at most {MOST_CHAIN} rows, got {rows}")
        key = (num_rows, rows_per_request, top_k, num_experts)
        if key not in self.tables:
            self.tables[key] = self._table(key, router_logits.device)
        ids, weights, index = self.tables[key]
        index.random_(0, NUM_TABLES)
        return weights[:rows], ids[:, :rows].index_select(0, index).squeeze(0)

    @torch.inference_mode(False)  # the tensors are changed in place within and outside of it
    def _table(self, key: tuple[int, ...], device: torch.device) -> Table:
        num_rows, per_request, top_k, experts = key
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"routing: {num_rows} rows were not warmed up before their graph")
        shape = (NUM_TABLES, num_rows, top_k)
        return (
            sample_experts(shape, per_request, experts, self.share, device),
            torch.full((num_rows, top_k), 1 / top_k, device=device),
            torch.zeros(1, dtype=torch.long, device=device),
        )


def choose(name: str | None) -> None:
    """Set the routing of engines that this process starts; None: the model's own router."""
    if name is not None:
        os.environ.update({VARIABLE: name, "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": NAME})


def register() -> None:
    """Change vLLM in a process of an engine: a plugin of vLLM, `PLUGIN`, calls it.

    The engine core gets the utility method ``set_draft_len(k)``, and with a routing workers get
    ``set_routing(name)`` and ``routed_rows()``, the rows and rows per request of the tables.
    """
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.worker_base import WorkerBase

    EngineCore.set_draft_len = set_draft_len
    name = os.environ.get(VARIABLE)
    if name is None or hasattr(WorkerBase, "set_routing"):
        return
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.router import routing_simulator_router as simulator

    routing = Routing(name)

    class Strategy(simulator.RoutingStrategy):  # type: ignore[misc]
        def route_tokens(
            self,
            hidden_states: torch.Tensor,  # noqa: ARG002
            router_logits: torch.Tensor,
            top_k: int,
            indices_type: torch.dtype | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # the same for every replay of a graph of whole steps; other graphs have no metadata
            metadata = get_forward_context().attn_metadata
            of_layer = next(iter(metadata.values()), None) if isinstance(metadata, dict) else None
            per_request = getattr(of_layer, "max_query_len", None)
            weights, ids = routing.route(router_logits, top_k, per_request)
            return weights, ids if indices_type is None else ids.to(indices_type)

    simulator.RoutingSimulator.register_strategy(NAME, Strategy())
    WorkerBase.set_routing = lambda _, name: routing.change(name)
    WorkerBase.routed_rows = lambda _: sorted(list(key[:2]) for key in routing.tables)


def set_draft_len(core: Any, k: int) -> None:
    """Give every batch size the draft length K, in the process of the engine core."""
    lengths = core.scheduler.dynamic_sd_lookup
    lengths[:] = [k] * len(lengths)
