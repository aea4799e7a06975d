"""From requests to prompts in tokens."""
