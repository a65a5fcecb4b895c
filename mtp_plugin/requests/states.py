"""Request states, finish reasons and the request ids of padding rows."""

from __future__ import annotations

from enum import Enum, IntEnum

from typing_extensions import override

CUDA_GRAPH_DUMMY_REQUEST_ID = 2**64 - 1
"""Request id of graph-padding rows; hosts that keep one dummy per draft length count down from
it."""


MAX_GRAPH_DUMMY_VARIANTS = 64
"""Ids in [CUDA_GRAPH_DUMMY_REQUEST_ID - 63, CUDA_GRAPH_DUMMY_REQUEST_ID] are graph-padding ids."""


def is_graph_dummy_id(request_id: int) -> bool:
    """True for the ids that hosts give to graph-padding rows."""
    return request_id > CUDA_GRAPH_DUMMY_REQUEST_ID - MAX_GRAPH_DUMMY_VARIANTS


class RequestState(IntEnum):
    """Life of a request; values order the phases."""

    CONTEXT_INIT = 1
    GENERATION_IN_PROGRESS = 2
    GENERATION_COMPLETE = 3


class FinishReason(str, Enum):
    """Why a request ended; equal to its value, which is what users read."""

    END_ID = "stop"
    STOP_WORDS = "stop_words"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"

    @override
    def __str__(self) -> str:
        return self.value
