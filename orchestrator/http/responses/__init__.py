"""OpenAI's Responses API over conversations: items for messages, and answers that can be referred to."""
