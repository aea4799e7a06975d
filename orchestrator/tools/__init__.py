"""Programs around the pipeline: bench, profile, simulate, drill, calibration, pairs, doctor, attach, service.

They use the API and the runtime. The layers below do not import them, and they print nothing.
"""
