"""`doctor --draft FILE.mlpackage`: what the package is, by a process that can read it."""

import subprocess

import msgspec

from orchestrator.machine.drafts.stateful_draft import stateful_draft
from orchestrator.machine.finding import Finding
from protocol.contracts.coreml.package_report import PackageReport
from protocol.errors import InputError
from protocol.own_modules import module_command

_PATIENCE = 120.0
"""Seconds for reading a package of several GB."""


def package_finding(name: str) -> Finding:
    try:
        path = stateful_draft(name)
    except InputError as error:
        return Finding("draft package", "fail", str(error))
    command = [*module_command("draft_worker.coreml.stateful"), str(path)]
    try:
        answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE, check=False)
        report = msgspec.json.decode(answer.stdout, type=PackageReport)
    except (subprocess.TimeoutExpired, msgspec.DecodeError):
        text = f"{path} could not be read: the process that reads it crashed or hung"
        return Finding("draft package", "fail", text, "download the package again")
    return Finding("draft package", "ok" if report.fits else "fail", report.text)
