"""OpenAI's chat completions and completions: request models, structured output, tool calls, answers.

Pure. The Responses API and Anthropic's API translate their requests to chat requests, and reuse parts of the answers.
"""
