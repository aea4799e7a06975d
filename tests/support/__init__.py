"""Helpers that several test files share: models, processes, fakes."""
