"""A step's rows and the sampler's store -> what target and worker read of its generations."""

from mtp_plugin.executor.step_inputs.contract import GenerationInputs
from mtp_plugin.executor.step_inputs.door import generation_inputs

__all__ = ["GenerationInputs", "generation_inputs"]
