"""Models on this machine: where they are, and what their levels mean."""
