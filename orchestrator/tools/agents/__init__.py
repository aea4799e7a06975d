"""Agents and editors of others in a terminal, run against an HTTP server that speaks OpenAI's and Anthropic's APIs.

`programs` knows what each one reads, `server` asks the server, `process` runs the program. Knows no pipeline.
"""
