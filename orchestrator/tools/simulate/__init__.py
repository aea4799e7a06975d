"""The real state machine against modelled workers in virtual time: predictions, and the workers of simulated hours.

Has no sockets, processes, models or real clock.
"""
