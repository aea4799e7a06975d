"""Anthropic's Messages API over chats: content blocks for texts and tool calls."""
