"""Drafters whose rows read the target's features, or the output of the row before: EAGLE-3, MTP.

Knows no messages, no growth plans and no checkpoint's form.
"""
