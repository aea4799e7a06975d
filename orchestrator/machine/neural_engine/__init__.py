"""Whether a converted draft can run on this machine's Neural Engine: the examination, its judgement, its verdicts.

Starts the examining processes; imports no Core ML, and knows no pipeline.
"""
