"""What the target verifies next and when it waits: the strategies. Pure.

Knows no message flow and no workers.
"""
