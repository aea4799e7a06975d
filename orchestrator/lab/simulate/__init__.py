"""The real state machine and the real workers, without models, in virtual time: predictions, and hours of faults."""
