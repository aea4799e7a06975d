"""The real state machine against modelled workers in virtual time: predictions, and hours of faults."""
