"""The real state machine with modelled workers in virtual time: predictions, and hours of faults."""
