"""Authentication of other machines: addresses and keys; private files.

Knows neither messages nor models.
"""
