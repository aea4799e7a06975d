"""Profiles a pipeline: from the spans of its processes to figures and a trace."""
