"""Benches of one question each: several requests at once, long prompts, an agent's turns."""
