"""The Python interface for other programs: Pipeline, Client, AsyncClient, SamplingParams.

Prints nothing.
"""
