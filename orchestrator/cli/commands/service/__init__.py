"""`launch-pipeline serve` as a service of the user: a LaunchAgent on macOS, a systemd user unit on Linux.

Knows what a service is started with, not what it does.
"""
