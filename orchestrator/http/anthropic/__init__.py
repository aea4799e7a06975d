"""Anthropic's Messages API, translated to chat requests: content blocks for texts and tool calls."""
