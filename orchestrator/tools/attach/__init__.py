"""Lends a worker of this machine to a pipeline on another machine, and finds such pipelines.

Knows no requests.
"""
