"""OpenAI's chat completions and completions: request models, structured output, tool calls, answers.

Pure but for the routes; Anthropic's API renders through the same answers.
"""
