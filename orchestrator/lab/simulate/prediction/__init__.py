"""`launch-pipeline plan`: speeds predicted by simulation, beside those of the baselines, as text and pictures."""
