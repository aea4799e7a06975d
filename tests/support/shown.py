"""Findings as a reader sees them in a terminal."""

import io

from rich.console import Console

from orchestrator.lab import report
from orchestrator.lab.findings import Findings


def shown(findings: Findings, width: int = 300, colours: bool = False) -> str:
    """The text; `colours`: with the terminal's escapes."""
    output = io.StringIO()
    system = "standard" if colours else None
    Console(file=output, width=width, force_terminal=colours, color_system=system).print(report.text(findings))
    return output.getvalue()


def complaints(findings: Findings, status: str = "fail") -> list[str]:
    """A sentence for each check that has this status."""
    return [f"{check.name}: {check.text}" for check in findings.checks if check.status == status]
