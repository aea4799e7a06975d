"""Packages that others converted, which keep their KV as Core ML states: what they are, and calls of them."""
