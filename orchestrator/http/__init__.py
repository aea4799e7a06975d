"""The OpenAI-compatible server: a client of the pipeline, in a process of its own beside the orchestrator's."""
