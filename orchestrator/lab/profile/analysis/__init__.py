"""From a traced run to figures: rounds, overlap, the target's idle time. Pure."""
