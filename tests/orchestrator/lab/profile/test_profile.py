"""A profile of real processes: all files, consistent sums, and figures that agree with the pipeline's own."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from orchestrator.api.settings import PipelineSettings
from orchestrator.cli.app import cli
from orchestrator.lab.profile.measure import REPEATS, MeasuredRun, ProfileTask, measure
from orchestrator.lab.profile.report import NAMES, write_files
from orchestrator.lab.profile.run import load
from protocol.errors import PipelineError

PROMPT = "def quicksort(items):\n"


@pytest.fixture(scope="module")
def measured() -> MeasuredRun:
    # This strategy drafts, also where it does not pay.
    return measure(ProfileTask(PROMPT, (0.0, 1.0), 96, 1, PipelineSettings(placement="apart", strategy="ssd")), most=1)


@pytest.fixture(scope="module")
def folder(measured: MeasuredRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    write_files(measured, folder)
    return folder


def trace_of(folder: Path) -> Trace:
    return Trace.FromString((folder / "trace.perfetto-trace").read_bytes())


@pytest.mark.parametrize("place", [0, 1], ids=["T = 0", "T = 1"])
def test_replays_did_the_work_of_the_run_which_needs_no_notes(place: int, measured: MeasuredRun):
    account = measured.profile.requests[place]

    assert min(account.draft_alone or 0.0, account.target_alone or 0.0) > 0.0
    assert account.repeats == REPEATS
    assert measured.profile.notes == ()


def test_all_files_are_there_and_a_trace_has_a_track_for_each_device_and_role(folder: Path):
    names = [packet.track_descriptor.name for packet in trace_of(folder).packet if packet.track_descriptor.name]

    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert len(names) == 5
    assert {name.split(" ")[0].strip(":") for name in names} == {"target", "draft", "orchestrator", "awaits"}


def test_a_perfetto_trace_closes_every_slice_in_the_order_of_time(folder: Path):
    trace = trace_of(folder)
    open_by_track: dict[int, int] = {}
    last: dict[int, int] = {}
    for packet in trace.packet:
        track = packet.track_event.track_uuid
        if not track:
            continue
        assert packet.timestamp >= last.get(track, 0)
        last[track] = packet.timestamp
        begins = packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN
        open_by_track[track] = open_by_track.get(track, 0) + (1 if begins else -1)
        assert open_by_track[track] >= 0

    assert set(open_by_track.values()) == {0}


@pytest.mark.thorough
def test_the_target_alone_has_a_profile_too(tmp_path: Path):
    command = ["profile", PROMPT, "--draft-engine", "none", "--temperature", "0", "--max-tokens", "8", "--json"]
    result = CliRunner().invoke(cli, [*command, "--out", str(tmp_path / "new" / "folder")], catch_exceptions=False)

    (account,) = json.loads(result.stdout)["accounts"]
    assert account["overlap_efficiency"] is account["overlapped_share"] is account["hit_rate"] is None
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == sorted(NAMES)


def test_a_folder_without_a_trace_is_refused(tmp_path: Path):
    with pytest.raises(PipelineError, match="run the profile again"):
        load(tmp_path)
