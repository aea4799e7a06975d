"""Trains draft models and the demo pair: `prepare` makes the text, `train` the target, `distil` a draft.

The programs run alone (`python -m orchestrator.lab.training.train`). `prepare` needs the project's own packages;
the others need torch too, which the extra `training` installs.
"""
