"""What `doctor` checks."""

from orchestrator.tools.doctor.doctor import examine
from orchestrator.tools.first_light.asked import Asked
from orchestrator.tools.first_light.report.findings import Check, Findings


def measure(asked: Asked) -> Findings:
    asked.notice("checking packages, devices, memory and network")
    checks = (Check(finding.name, finding.status, finding.text, finding.next_step) for finding in examine())
    return Findings(checks=tuple(checks))
