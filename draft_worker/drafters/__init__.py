"""Networks of trained drafters, with the tensor names of their published files, for engines and training alike.

Knows no trees, sampling or messages. One module a kind; the files' formats stand in modules beside them.
"""
