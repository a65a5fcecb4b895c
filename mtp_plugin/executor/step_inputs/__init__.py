"""A step's rows and the sampler's store -> what target and worker read of its generations."""

from mtp_plugin.executor.step_inputs.reference import GenerationInputs, generation_inputs

__all__ = ["GenerationInputs", "generation_inputs"]
