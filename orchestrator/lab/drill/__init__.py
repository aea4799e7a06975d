"""Tests of the promises about faults, with real processes and real faults, and figures of the outcome."""
