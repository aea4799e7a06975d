"""Ollama's API, translated to chat requests: streams of JSON lines, options, durations in nanoseconds."""
