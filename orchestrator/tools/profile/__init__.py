"""Where the time of a pipeline goes: from the spans of its processes to figures and pictures.

Changes no decision of the run that it measures.
"""
