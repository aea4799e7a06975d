"""Programs around the pipeline: bench, profile, simulate, drill, calibration, pairs, doctor, attach.

They use the API and the runtime; nothing below imports them, and they print nothing.
"""
