"""The documents held against the code."""
