"""The laboratory: what measures, models and tries the pipeline. bench, profile, plan, calibrate, first-light.

It uses the API and the runtime. The layers below do not import it, and it prints nothing.
"""

from protocol.processes import keep_descriptor_limit

# Some of its programs import mlx-lm.
keep_descriptor_limit()
