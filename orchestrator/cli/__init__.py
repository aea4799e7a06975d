"""The command line: options, settings, text for people. The only package that prints.

One command a file in `commands`.
"""
