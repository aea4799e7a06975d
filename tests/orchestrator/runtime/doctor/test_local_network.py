"""What `doctor` says of the local network, which macOS keeps from programs that were not allowed."""

import errno

from orchestrator.machine.network import reachable_host
from orchestrator.runtime.doctor.doctor import local_network
from protocol.security.addresses import Endpoint


def forbidden() -> None:
    raise OSError(errno.EHOSTUNREACH, "No route to host")


def test_on_macos_a_program_that_may_not_is_told_what_to_allow():
    finding = local_network("192.168.1.5", "darwin", forbidden)

    assert finding.status == "warn"
    assert "Local Network" in (finding.next_step or "")
    assert "in Terminal and over SSH no permission is needed" in (finding.next_step or "")


def test_on_macos_a_program_that_may_is_fine_and_warned_of_others():
    finding = local_network("192.168.1.5", "darwin", lambda: None)

    assert finding.status == "ok"
    assert "launchd agent, may be refused" in finding.text


def test_other_systems_are_not_queried():
    assert local_network("192.168.1.5", "linux", forbidden).status == "ok"
    assert local_network(None, "darwin", forbidden).status == "ok"


def test_a_join_line_names_the_bound_host_unless_that_means_any():
    assert reachable_host(Endpoint("192.168.1.5", 1)) == "192.168.1.5"
    assert reachable_host(Endpoint("0.0.0.0", 1)) not in ("0.0.0.0", "")
