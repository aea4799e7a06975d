"""Power meters, and the energy that their samples add up to."""
