"""The orchestrator: keeps the speculation cache, starts the workers, serves clients."""

from orchestrator.client import AsyncClient, Client, Stream
from orchestrator.pipeline import Pipeline
from orchestrator.reply import Result
from orchestrator.sampling_params import SamplingParams
from protocol.errors import InputError, PipelineError

__all__ = ["AsyncClient", "Client", "InputError", "Pipeline", "PipelineError", "Result", "SamplingParams", "Stream"]
