"""Benches of other loads: several requests at once, long prompts, an agent's turns."""
