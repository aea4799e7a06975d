"""What other programs import: Pipeline, Client, AsyncClient, SamplingParams.

Prints nothing.
"""
