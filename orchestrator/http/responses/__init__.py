"""OpenAI's Responses API over chats: items for messages, and answers that later requests can refer to."""
