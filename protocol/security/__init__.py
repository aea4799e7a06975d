"""Who may connect from another machine: keys, pinned keys, the ZAP authenticator, files that only their owner reads.

Nothing here knows messages or models.
"""
