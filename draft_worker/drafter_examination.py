"""Loads a trained drafter as a worker does, lets it guess a text that the target writes, and prints one report in JSON.

It guesses the same text with other readings of its config.json too: one key read wrongly costs half of its worth, and
nothing else shows it. `python -m draft_worker.drafter_examination ENGINE FOLDER TARGET`
"""

import json
import os
import shutil
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from tokenizers import Tokenizer

from draft_worker.engine_interface import Batch
from draft_worker.features import LARGEST
from protocol.child_process import claim_output
from protocol.contracts.drafters.readings import other_readings
from protocol.contracts.model_report import Loaded, ModelRefusal
from protocol.errors import InputError
from protocol.inference.stored_model import load_network, ready_for_processor
from protocol.inference.tap import proved_tap
from protocol.messages.features import FINAL
from protocol.messages.sampling import Sampling
from protocol.worker.process import WorkerSetup

_PROMPT = "Question: How do I sort a list of dicts by a key in Python?\nAnswer:"
_OWN = 64
"""Tokens that the target writes behind it."""
_BLOCK, _STEPS = 8, 3
"""Guesses behind each of them, of a drafter of blocks and of one that guesses one token a forward."""
_DEVIATIONS = 3.0
"""By so many standard deviations another reading must be better."""


class OwnText(NamedTuple):
    """A target's text."""

    tokens: list[int]
    states: np.ndarray
    """(tokens, 1 + layers, width): the outputs behind the final norm and of each layer."""


def main() -> int:
    report = claim_output()
    report(examine(*sys.argv[1:]))
    return 0


def examine(engine: str, folder: str, target: str) -> Loaded | ModelRefusal:
    try:
        _loaded(engine, folder, target)  # What is wrong with the drafter is told before the target writes.
        return checked(engine, folder, target, own_text(Path(target)))
    except InputError as error:
        return ModelRefusal(text=str(error))


def own_text(folder: Path) -> OwnText:
    """A prompt, and what the target in `folder` writes behind it at T = 0. Raises InputError if it can't be loaded, or
    its states can't be recorded."""
    model, _ = load_network(folder)
    ready_for_processor(model)
    tap = proved_tap(model)
    if tap is None:
        raise InputError(f"The states of the target in {folder} can't be recorded: choose a draft that reads none.")
    tokens = new = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_PROMPT).ids
    cache = make_prompt_cache(model)
    for _ in range(_OWN):
        new = [int(mx.argmax(model(mx.array([new]), cache=cache)[0, -1]))]
        tokens = [*tokens, *new]
    tap.record((FINAL, *range(tap.taps.layers)))
    model(mx.array([tokens]), cache=make_prompt_cache(model))
    recorded = tap.take()
    assert recorded is not None, "the tap records"
    return OwnText(tokens, recorded.numbers.reshape(len(tokens), -1, tap.taps.width))


def checked(engine: str, folder: str, target: str, text: OwnText) -> Loaded:
    """With the plausible reading that makes most guesses right, if it is clearly better than the reading as it is."""
    hits, best = right_guesses(_loaded(engine, folder, target), text), 0
    share = "{} of {} guesses of the target's own text are right".format
    guessed = f"{share(hits.sum(), hits.size)}, and no other reading has clearly more."
    for key, read, value, config in other_readings(Path(folder), Path(target), with_own_head=engine == "mtp"):
        with TemporaryDirectory() as place, suppress(InputError):  # Its tensors may fit the sizes as they were read.
            shutil.copytree(Path(folder).absolute(), place, copy_function=os.symlink, dirs_exist_ok=True)
            Path(place).chmod(0o700)  # `copytree` gives it the folder's mode.
            Path(place, "config.json").unlink()
            Path(place, "config.json").write_text(json.dumps(config))
            other = right_guesses(_loaded(engine, place, target), text)
            mine = hits[:, : other.shape[1]]
            # Guesses of one token by several roots are right or wrong together.
            places = np.add.outer(*map(np.arange, mine.shape))
            gain = np.bincount(places.ravel(), (other[:, : hits.shape[1]] - mine).ravel())
            if gain.sum() > max(best, _DEVIATIONS * np.sqrt((gain**2).sum())):
                best = int(gain.sum())
                guessed = (
                    f"{key} of the draft's config.json is probably wrong, or read wrongly: as read ({read}) "
                    f"{share(mine.sum(), mine.size)}, and with {value} {mine.sum() + best}. "
                    "Tokens stay right: compare the key with the drafter's source."
                )
    return Loaded(guessed=guessed, wrong=best > 0, first=float(hits[:, 0].mean()))


def right_guesses(engine: Any, text: OwnText) -> np.ndarray:
    """(places, guesses): 1 where the drafter's best guess is the target's token, behind tokens that are the target's
    too. A block drafter guesses a block at most."""
    tokens = text.tokens
    guesses = min(_BLOCK, engine.runner.form.rows) if engine.name == "block" else _STEPS
    states = text.states[:, [output + 1 for output in engine.features.outputs]]
    rows = states.reshape(len(tokens), -1).clip(-LARGEST, LARGEST)
    sequence, hits = engine.open(Sampling(), engine.vocabulary), list[list[bool]]()
    for root in range(len(tokens) - _OWN, len(tokens) - _BLOCK):
        begin, path = sequence.committed, tokens[root : root + guesses]
        sequence.truncate(begin)
        sequence.prefill(tokens[begin:root])
        sequence.feed(begin, rows[begin:root])
        while sequence.unread:
            sequence.read(root)
        first = sequence.next_row
        found = sequence.evaluate(Batch([], path, [-1, *range(first, first + guesses - 1)], 1))
        right = tokens[root + 1 : root + 1 + guesses]
        hits.append([each.tokens[:1] == [token] for each, token in zip(found, right, strict=True)])
    return np.array(hits, np.int32)


def _loaded(engine: str, folder: str, target: str) -> Any:
    """Raises InputError for a drafter that can't be served."""
    setup = WorkerSetup(address="", epoch=0, incarnation=0, engine=engine, model=folder, target=target)
    return import_module(f"draft_worker.engines.{engine}").load(setup)


if __name__ == "__main__":
    sys.exit(main())
