"""Arguments and reports of processes that are not workers, and fingerprints of the files that processes share.

Plain data; nothing here runs a process.
"""
