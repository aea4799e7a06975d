"""OpenAI's chat completions and completions: requests, histories, prompts, answers, and the server of one model.

The other APIs translate their requests to these, and reuse parts of the answers.
"""
