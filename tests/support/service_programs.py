"""Stand-ins for launchctl and systemctl: they keep what they were told in a folder, and answer as those do."""

from pathlib import Path

_LAUNCHCTL = """#!/bin/sh
cd "{folder}" || exit 1
echo "$*" >>told
case $1 in
print)
    if [ -e no-domain ]; then echo "Could not find domain" >&2; exit 112; fi
    case $2 in gui/*/*)
        [ -e loaded ] || exit 113
        printf '%s = {{\\n\\tstate = running\\n\\tpid = 4242\\n}}\\n' "$2" ;;
    esac ;;
bootstrap)
    # Unloading takes a while, and loading fails meanwhile.
    if [ -s busy ]; then sed 1d busy >less; mv less busy; echo "Bootstrap failed: 5: Input/output error" >&2; exit 5; fi
    cp "$3" loaded ;;
bootout) if [ -e loaded ]; then rm loaded; else echo "Boot-out failed: 3: No such process" >&2; exit 3; fi ;;
esac
"""

_SYSTEMCTL = """#!/bin/sh
cd "{folder}" || exit 1
[ "$1" = --user ] || exit 64
shift
echo "$*" >>told
case $1 in
show-environment) if [ -e no-bus ]; then echo "Failed to connect to bus: No medium found" >&2; exit 1; fi ;;
restart) : >loaded ;;
disable) rm -f loaded ;;
show) if [ -e loaded ]; then echo "MainPID=4242"; echo "ActiveState=active"; else echo "ActiveState=inactive"; fi ;;
esac
"""


def _stand_in(folder: Path, name: str, script: str) -> Path:
    folder.mkdir()
    program = folder / name
    program.write_text(script.format(folder=folder))
    program.chmod(0o755)
    return program


def fake_launchctl(folder: Path) -> Path:
    """`no-domain` beside it: nobody is logged in at the screen; a line in `busy` for each time that loading fails."""
    return _stand_in(folder, "launchctl", _LAUNCHCTL)


def fake_systemctl(folder: Path) -> Path:
    """`no-bus` beside it: there is no session of this user."""
    return _stand_in(folder, "systemctl", _SYSTEMCTL)


def told(program: Path) -> list[str]:
    """What a stand-in was called with, call by call."""
    log = program.parent / "told"
    return log.read_text().splitlines() if log.exists() else []
