"""Which machines may connect: keys, pinned keys, the ZAP authenticator, files that only their owner can read.

Knows no messages or models.
"""
