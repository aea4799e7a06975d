"""One drill a file: a promise, the faults that test it, the figures of the result.

A drill returns its outcome and prints nothing.
"""
