"""What processes that are not workers are told and what they report, and fingerprints of the files they share.

Plain data; nothing here runs anything.
"""
