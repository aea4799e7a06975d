"""Monitoring of the pipeline behind the server: health, figures for Prometheus, events for the live page.

Nothing here answers a generation request.
"""
