"""Anthropic's Messages API over conversations: blocks for texts and calls."""
