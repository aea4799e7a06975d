"""Text and tokens: tokenizer, stop strings, chat templates.

Knows no requests and no sockets.
"""
