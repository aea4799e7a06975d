"""OpenAI's Responses API over chat requests: items for messages, and responses that later requests refer to."""
