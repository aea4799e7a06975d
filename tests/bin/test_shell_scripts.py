"""Laws of the shell scripts: they parse, and use nothing that bash 3.2, macOS's own, does not have.

Each construct is from the list of changes in bash's NEWS and CHANGES files, with the version that brought it.
"""

import os
import re
import subprocess

import pytest

from tests.bin.test_bootstrap import BASH, SCRIPTS
from tests.support.paths import ROOT

_NEWER = {
    "associative arrays (4.0)": (r"\b(declare|local|typeset) +-[a-zA-Z]*A", "declare -A map"),
    "mapfile, readarray (4.0)": (r"\b(mapfile|readarray)\b", "mapfile -t lines"),
    "coproc (4.0)": (r"\bcoproc\b", "coproc cat"),
    "case changes in expansions (4.0)": (r"\$\{\w+(\[[^]]*\])?(,,?|\^\^?)", "echo ${name,,}"),
    "|& (4.0)": (r"\|&", "make |& tee log"),
    "&>> (4.0)": (r"&>>", "make &>>log"),
    ";& and ;;& in case (4.0)": (r";;?&", "a) b ;;& c) d ;;"),
    "{01..10}, {1..9..2} (4.0)": (r"\{0\d+\.\.|\.\.\d+\.\.", "echo {1..9..2}"),
    "globstar, ** (4.0)": (r"\bglobstar\b", "shopt -s globstar"),
    "BASHPID (4.0)": (r"\bBASHPID\b", "kill $BASHPID"),
    "read -t with a fraction, -i, -N (4.0)": (r"\bread +(-\w+ +)*-(t +0?\.|i|N)", "read -t 0.5 line"),
    "{name}> redirections (4.1)": (r"(?<!\$)\{[a-zA-Z_]\w*\}[<>]", "exec {lock}>file"),
    "BASH_XTRACEFD (4.1)": (r"\bBASH_XTRACEFD\b", "BASH_XTRACEFD=3"),
    "declare -g (4.2)": (r"\bdeclare +-[a-zA-Z]*g", "declare -g name"),
    "lastpipe (4.2)": (r"\blastpipe\b", "shopt -s lastpipe"),
    "printf %(...)T (4.2)": (r"%\([^)]*\)T", "printf '%(%F)T'"),
    "[[ -v name ]] (4.2)": (r"\[\[? +(! +)?-v ", "[[ -v name ]]"),
    "negative lengths and indices (4.2)": (r"\$\{\w+:[^}]*: *-|\$\{\w+\[-", "echo ${list[-1]}"),
    r"$'\u00e4' (4.2)": (r"\$'[^']*\\[uU]", r"echo $'\u00e4'"),
    "namerefs (4.3)": (r"\b(declare|local|typeset) +-[a-zA-Z]*n", "local -n other=$1"),
    "wait -n (4.3)": (r"\bwait +-[a-z]*n", "wait -n"),
    "${name@Q} (4.4)": (r"\$\{\w+(\[[^]]*\])?@[A-Za-z]\}", "echo ${name@Q}"),
    "local - (4.4)": (r"\blocal +-(\s|;|$)", "local -\n"),
    "EPOCHSECONDS and others (5.0)": (r"\bEPOCH(SECONDS|REALTIME)\b|\bSRANDOM\b", "echo $EPOCHSECONDS"),
    "wait -p (5.1)": (r"\bwait +-[a-z]*p", "wait -p name"),
}


def _newer(script: str) -> list[str]:
    code = re.sub(r"(?m)(^|\s)#.*$", "", script)
    return [construct for construct, (pattern, _) in _NEWER.items() if re.search(pattern, code)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse_and_run_as_they_are(script: str):
    subprocess.run([BASH, "-n", str(ROOT / script)], check=True)

    assert script == "bin/.bootstrap" or os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_use_nothing_newer_than_bash_3_2(script: str):
    assert _newer((ROOT / script).read_text()) == []


@pytest.mark.parametrize("construct", _NEWER)
def test_each_newer_construct_would_be_found(construct: str):
    assert _newer(_NEWER[construct][1]) == [construct]
