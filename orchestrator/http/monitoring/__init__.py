"""How the pipeline behind the server does: health, figures for Prometheus, events for the live page.

Nothing here answers a generation request.
"""
