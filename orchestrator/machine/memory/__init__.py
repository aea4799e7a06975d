"""The memory that a pipeline needs, and what fits into this machine's. Loads nothing."""
