"""Laws of a pipeline's private folder: nobody else's place, and there even while another session ends."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime import session
from orchestrator.runtime.session import Session
from protocol.errors import InputError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session, "sessions_folder", lambda: tmp_path / "home")
    return tmp_path / "home"


def test_the_end_of_another_session_does_not_fail_a_new_one(home: Path, monkeypatch: pytest.MonkeyPatch):
    other, make, asked = Session.create(), tempfile.mkdtemp, []

    def made(**options: Any) -> str:
        if not asked:
            other.remove()
        asked.append(options)
        return make(**options)

    monkeypatch.setattr(tempfile, "mkdtemp", made)
    created = Session.create()

    assert (created.folder.parent, created.folder.is_dir(), len(asked)) == (home, True, 2)


def test_a_home_that_others_can_enter_is_refused(home: Path):
    home.mkdir()
    home.chmod(0o777)

    with pytest.raises(InputError, match="must be yours alone"):
        Session.create()


def test_a_link_to_a_private_folder_of_the_user_is_refused_and_nothing_is_swept_there(home: Path, tmp_path: Path):
    (elsewhere := tmp_path / "mine").mkdir(mode=0o700)
    (elsewhere / "lp-letters").mkdir()
    home.symlink_to(elsewhere)

    with pytest.raises(InputError, match="is a link: remove it, or let LAUNCH_PIPELINE_SESSIONS name another"):
        Session.create()
    assert (elsewhere / "lp-letters").is_dir()


def test_last_words_name_a_lack_of_memory_and_leave_out_what_follows_from_it(home: Path):
    session = Session.create()
    said = [
        "at work",
        "Rank 1 ran out of memory.",
        "[ring] Sending failed.",
        "Traceback",
        "RuntimeError: a peer is gone",
    ]
    session.log("target").write_text("\n".join(said))

    assert session.last_words("target", 3) == " / ".join([*said[:2], *said[3:]][-3:])
    assert session.last_words("target", 2) == " / ".join([said[1], *said[3:]])
    assert session.last_words("target", 1) == " / ".join([said[1], said[4]])
