"""Measures our strategies beside mlx-lm's own code. One module a subcommand, with the columns of its tables.

`trials` runs a comparison; `orchestrator.lab.report` shows every finding.

Only programs that run as processes of their own import MLX.
"""
