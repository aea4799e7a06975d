"""Commands that measure this machine, or compare on it."""
