"""One drill a file: a promise, the faults that test it, the figures that come out."""
