"""Lends a worker of this machine to a pipeline on another one, and finds such pipelines."""
