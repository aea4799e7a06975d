"""One file for each command: options in, a call of the layers below, text out.

The work itself is in the layers below.
"""
