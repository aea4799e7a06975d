"""Which prompts are held out: the same ones whatever their order, and also when further prompts are added."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from draft_worker.training.corpus.answers import Prompt
from draft_worker.training.whole_file import whole_file
from protocol.errors import InputError

_SHARE = 40
"""One of so many prompts is never trained on."""
FEWEST = 2
"""That answers are written for."""


def divided(prompts: Sequence[Prompt], fewest: int, file: Path) -> tuple[list[Prompt], list[Prompt]]:
    """Those to train on, and those held out: one of forty by a hash of its tokens, and at least `fewest`.

    `file` keeps which ones were needed for that, so that none of them is trained on later.
    """
    hashes = [hashlib.sha256(msgspec.json.encode(prompt)).hexdigest() for prompt in prompts]
    kept = _read(file)
    chosen = {each for each in hashes if int(each[:8], 16) % _SHARE == 0 or each in kept}
    lacking = sorted({*hashes} - chosen)[: max(0, fewest - len(chosen))]
    if lacking:
        with whole_file(file) as unfinished:
            unfinished.write_bytes(msgspec.json.encode([*kept, *lacking]))
    chosen.update(lacking)
    pairs = list(zip(prompts, hashes, strict=True))
    return [prompt for prompt, each in pairs if each not in chosen], [
        prompt for prompt, each in pairs if each in chosen
    ]


def _read(file: Path) -> list[str]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[str]) if file.is_file() else []
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{file} is damaged ({error}): pass another folder as --work.") from error
