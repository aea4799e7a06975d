"""The real state machine against modelled workers in virtual time: what a pair of devices would reach."""
