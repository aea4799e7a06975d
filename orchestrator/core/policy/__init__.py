"""What the target verifies next and when it waits: the strategies, the expected-rate rule, running estimates. Pure.

Knows no message flow and no workers.
"""
