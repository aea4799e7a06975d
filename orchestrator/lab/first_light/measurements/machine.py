"""What `doctor` checks."""

from orchestrator.lab.findings import Check, Findings
from orchestrator.lab.first_light.asked import Asked
from orchestrator.runtime.doctor.doctor import examine


def measure(asked: Asked) -> Findings:
    asked.notice("checking packages, devices, memory and network")
    checks = (Check(finding.name, finding.status, finding.text, finding.next_step) for finding in examine())
    return Findings(checks=tuple(checks))
