"""Authentication of other machines: addresses, keys, pinned keys, the ZAP authenticator, private files.

Knows neither messages nor models.
"""
