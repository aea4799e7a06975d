"""Whether MLX's kernels were built for this macOS: newer builds have kernels that older ones lack."""

from orchestrator.machine.finding import Finding

_BUILDS = (14, 15, 26)
"""The versions of macOS for which the package index has builds of mlx-metal 0.32. That for 26 alone has the kernels for
the matrix units of the M5 (ml-explore/mlx issue 3821)."""


def metal_kernels(system: str, built_for: int | None, mlx: str | None) -> Finding:
    """`system`: the version of macOS, empty if unknown. `built_for`: the major version that the installed wheel names.

    `mlx`: the installed version of mlx and mlx-metal, which are always the same.
    """
    major = system.partition(".")[0]
    if built_for is None or not major.isdecimal():
        return Finding("Metal kernels", "ok", "not from a wheel of the package index")
    best = max((build for build in _BUILDS if build <= int(major)), default=built_for)
    if built_for >= best:
        return Finding("Metal kernels", "ok", f"built for macOS {built_for}; this is macOS {system}")
    return Finding(
        "Metal kernels",
        "warn",
        f"built for macOS {built_for}, and this is macOS {system}: the build for macOS {best} has faster kernels",
        f"SYSTEM_VERSION_COMPAT=0 python -m pip install --force-reinstall --no-deps mlx=={mlx} mlx-metal=={mlx} "
        "(with uv: uv pip install --reinstall --no-deps ...), with the Python that runs launch-pipeline",
    )
