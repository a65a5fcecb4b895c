"""A reasoning parser of vLLM: a newline ends the thinking phase, which the tiny model drafts."""

from __future__ import annotations

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("newline")
class NewlineParser(DeepSeekR1ReasoningParser):
    """As vLLM's, with another end token."""

    end_token = "Ċ"
