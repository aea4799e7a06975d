"""Orders and reports of processes that are not workers, declarations, and fingerprints of shared files.

Plain data. Runs nothing.
"""
