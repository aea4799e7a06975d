"""What is counted for people: request statistics, the recorder behind the live page, its watchers. Pure.

Nothing here changes what the state machine does.
"""
