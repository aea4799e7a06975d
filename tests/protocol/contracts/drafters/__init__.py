"""Tests of the detection of trained drafters."""
