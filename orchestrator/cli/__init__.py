"""The command line: options, settings, text for users. The only package that prints.

Each command is one file in `commands`.
"""
