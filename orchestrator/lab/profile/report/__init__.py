"""A profile as tables, an HTML page, a timeline and a Perfetto trace.

Measures nothing.
"""
