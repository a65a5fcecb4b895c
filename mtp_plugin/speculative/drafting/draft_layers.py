"""Calls draft layers with the arguments that they accept."""

from __future__ import annotations

import torch

from mtp_plugin.errors import TensorContractError, expect
from mtp_plugin.speculative.drafting.forward_inputs import ForwardInputs
from mtp_plugin.speculative.host import DraftLayer, accepted_by, takes_output_rows

RANK_ROWS = "all_rank_num_tokens"
LAYER_ARGUMENTS = RANK_ROWS, "spec_metadata"


def run_layer(
    layer: DraftLayer,
    step: ForwardInputs,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    *,
    single_rows: bool = False,
    output_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run a draft layer; return its hidden states [T', H], or only ``output_rows`` of them [N, H].

    Args:
        input_ids, positions: [T']. hidden_states: [T', H]. single_rows: one row per request.
        output_rows: [N] flat indices of the rows to return; None: all.

    Raises:
        TensorContractError: a layer with ``takes_output_rows`` returned another number of rows.
    """
    extra = step.host.ranks.arguments(single_rows=single_rows)
    # under attention data parallelism ranks exchange all rows
    exchanges_rows = RANK_ROWS in extra
    optional = {RANK_ROWS: None, "spec_metadata": step.spec_metadata}
    accepted = accepted_by(layer, LAYER_ARGUMENTS, step.layer_kwargs)
    extra = {name: optional[name] for name in accepted} | extra
    selects = output_rows is not None and not exchanges_rows and takes_output_rows(layer)
    if selects:
        extra["output_rows"] = output_rows
    states: torch.Tensor = layer(
        embed_tokens=step.embed_tokens,
        input_ids=input_ids,
        position_ids=positions.unsqueeze(0),
        hidden_states=hidden_states,
        attn_metadata=step.attn_metadata,
        **extra,
    )
    if output_rows is None:
        return states
    if not selects:
        return states[output_rows]
    expect(
        states.shape[0] == output_rows.shape[0],
        TensorContractError,
        f"a layer with takes_output_rows returned {states.shape[0]} rows where "
        f"{output_rows.shape[0]} were requested",
    )
    return states
