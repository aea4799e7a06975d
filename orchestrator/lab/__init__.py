"""The laboratory: what measures, models and tries the pipeline. bench, profile, plan, calibrate, drill, first-light.

It uses the API and the runtime. The layers below do not import it, and it prints nothing.
"""
