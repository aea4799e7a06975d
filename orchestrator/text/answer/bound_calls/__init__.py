"""Calls that can be held to the schemas of their functions while decoding: how a model writes them, as a grammar."""
