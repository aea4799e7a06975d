"""What can guess: one module an engine."""
