"""Stand-ins for the tools that macOS has: they refuse what only GNU's understand, and pass on the rest.

The options are those of FreeBSD's manual pages, from which macOS has its tools, less `readlink -f`, which macOS has had
since 12.3 only.
"""

import shutil
from pathlib import Path

_OPTIONS = {
    "cat": "belnstuv",
    "chmod": "fhvHLPR",
    "cksum": "o:",
    "cp": "HLPRacfilnprsvx",
    "dirname": "",
    "grep": "A:B:C:abcEFGHIiLlm:nOopqRrSsUVvwxyzZe:f:",
    "head": "c:n:",
    "id": "AFGMPgnpru",
    "ls": "@ABCFGHILOPRSTUWabcdefghiklmnopqrstuvwxy1",
    "mkdir": "m:pv",
    "mv": "fhinv",
    "readlink": "n",
    "rm": "dfiIPRrvWx",
    "sleep": "",
    "tail": "Fb:c:fn:qrv",
    "tee": "ai",
    "uname": "amnoprsv",
}
"""Letters as getopts takes them."""

_STAND_IN = """#!/bin/sh
refuse() {{ echo "{name}: $1, which macOS does not understand" >&2; exit 64; }}
# getopts stops at the first operand, as BSD's getopt does.
OPTIND=1
while getopts ":{options}" letter; do
    case $letter in [?:]) refuse "option $OPTARG" ;; esac
done
position=0
for argument; do
    position=$((position + 1))
    if [ "$position" -ge "$OPTIND" ]; then
        case $argument in -?*) refuse "option $argument after an operand" ;; esac
    fi
done
exec "{program}" "$@"
"""


def install_bsd_tools(folder: Path, names: list[str]) -> None:
    """A stand-in for each tool in `folder`, which is to be all of PATH."""
    for name in names:
        file = folder / name
        file.write_text(_STAND_IN.format(name=name, options=_OPTIONS[name], program=shutil.which(name)))
        file.chmod(0o755)
