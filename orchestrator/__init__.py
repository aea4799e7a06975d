"""The orchestrator: keeps the speculation cache, starts the workers, serves clients."""
