"""Examines this machine and, on a Mac, its Neural Engine.

Changes nothing but the record of a finished examination.
"""
