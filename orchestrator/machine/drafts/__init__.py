"""Which draft stands beside a target: a shipped, a named or a converted one. Loads no weights into MLX."""
