"""Laws of the programs that write a target's answers and train its draft, on a tiny model. They need torch."""

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from orchestrator.lab.training import network, training_loop  # noqa: E402
from orchestrator.lab.training.chat_draft import conversation, distil, measure, write  # noqa: E402
from orchestrator.lab.training.chat_draft.decoder import Decoder  # noqa: E402
from orchestrator.lab.training.chat_draft.shards import Answers  # noqa: E402

VOCABULARY, END = 80, 1
SHAPE = network.Shape(hidden=32, layers=3, heads=2, kv_heads=1, feed_forward=48, vocabulary=VOCABULARY)
Run = Callable[..., None]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A random model with weights large enough for its context to matter, and a tokenizer of characters."""
    torch.manual_seed(0)
    model = network.Network(SHAPE)
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(8)
    folder = tmp_path / "target"
    network.save(model, folder)
    characters = sorted(set(pre_tokenizers.ByteLevel.alphabet()))[: VOCABULARY - 2]
    tokenizer = Tokenizer(models.BPE(vocab={token: number + 2 for number, token in enumerate(characters)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    vocabulary = json.loads(tokenizer.to_str())
    vocabulary["model"]["vocab"] |= {"<|x|>": 0, "<|im_end|>": END}
    vocabulary["added_tokens"][0]["id"] = END
    Tokenizer.from_str(json.dumps(vocabulary)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture
def shards(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards of answers."""
    lines = [json.dumps({"turns": [f"ABC{number}"[: 2 + number % 3], "why"]}) for number in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    for name in ("SYSTEM", "USER", "ASSISTANT"):
        monkeypatch.setattr(write, name, name[0])
    monkeypatch.setattr(write, "OUTPUTS", (1,))
    run_write(monkeypatch, tmp_path, target)
    return tmp_path / "work"


def run_write(monkeypatch: pytest.MonkeyPatch, folder: Path, target: Path) -> None:
    options = {"prompts": folder / "prompts.jsonl", "out": folder / "work", "target": target}
    numbers = ["--shards", "2", "--rows", "8", "--length", "40", "--float32", "--share", "1"]
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["write", *given, *numbers])
    write.main()


def test_a_step_of_the_decoder_gives_the_hidden_states_of_the_whole_text(target: Path):
    model = network.load(target)
    tokens = torch.randint(2, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(1))
    decoder = Decoder(model, 3, torch.float32)
    starts = torch.zeros(3, dtype=torch.int64)
    starts[1] = 4

    steps = [decoder.step(tokens[:, slot], slot, starts * (slot >= 4)) for slot in range(10)]
    found = steps[-1][:, -1]

    with torch.no_grad():
        whole, late = model.hidden(tokens)[:, -1], model.hidden(tokens[1:2, 4:])[:, -1]
    torch.testing.assert_close(found[[0, 2]], whole[[0, 2]], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1:2], late, rtol=1e-4, atol=1e-4)


def test_greedy_rows_hold_the_targets_best_tokens(shards: Path, target: Path):
    answers, model = Answers(shards), network.load(target)
    checked = 0
    for number in range(len(answers)):
        rows = answers.rows(np.array([number]))
        if rows.temperatures.item() != 0:
            continue
        with torch.no_grad():
            best = model.hidden(rows.tokens, mask=rows.mask) @ model.embed_tokens.weight.T
        own = rows.wanted[0, :-1] & (rows.mask[0, 0].sum(-1)[1:] > 1)
        assert (best.argmax(-1)[0, :-1][own] == rows.tokens[0, 1:][own]).all()
        checked += int(own.sum())
    assert checked > 10


def test_what_is_written_already_is_kept(shards: Path, target: Path, tmp_path: Path, monkeypatch):
    states = shards / "states"
    (states / "shard-0001.npy").unlink()
    before = (states / "shard-0000.npy").stat().st_mtime_ns

    run_write(monkeypatch, tmp_path, target)

    assert (states / "shard-0000.npy").stat().st_mtime_ns == before
    assert (states / "shard-0001.npy").is_file()


FRAME = conversation.Frame(system=[2, 3], user=[4], assistant=[5], again=[6, 4], end=END)
GIVEN, MESSAGE, ANSWER = conversation.Writer


def taken(text: conversation.Writing, sampled: Iterator[int]) -> list[tuple[int, int]]:
    """Each token of the text with its writer; the model samples these tokens."""
    found, step = [], next(text)
    while True:
        found.append((step.token, step.writer))
        try:
            step = text.send(0 if step.temperature is None else next(sampled))
        except StopIteration:
            return found


def test_a_text_ends_where_its_answer_loops():
    found = taken(conversation.answered([[7]], FRAME, 0.0), itertools.cycle([8, 9]))

    assert found[:6] == [(2, GIVEN), (3, GIVEN), (4, GIVEN), (7, GIVEN), (END, GIVEN), (5, GIVEN)]
    assert conversation.LOOP < len(found) < 30
    assert {writer for _, writer in found[6:]} == {ANSWER}


def test_an_answered_conversation_goes_on_with_the_next_turn_and_ends_after_the_last():
    found = taken(conversation.answered([[7], [8, 9]], FRAME, 0.7), iter((20, END, 21, END)))

    given = [(token, GIVEN) for token in (2, 3, 4, 7, END, 5)]
    again = [(token, GIVEN) for token in (6, 4, 8, 9, END, 5)]
    assert found == [*given, (20, ANSWER), (END, ANSWER), *again, (21, ANSWER), (END, ANSWER)]


def test_the_target_writes_a_message_behind_its_opening_and_answers_it():
    rng = random.Random(1)
    found = taken(conversation.both_sides([7], FRAME, 0.0, rng), itertools.cycle([20, END]))

    assert found[:4] == [(2, GIVEN), (3, GIVEN), (4, GIVEN), (7, GIVEN)]
    assert found[4:7] == [(20, MESSAGE), (END, MESSAGE), (5, GIVEN)]
    assert found[7:9] == [(20, ANSWER), (END, ANSWER)]


def test_a_message_that_says_nothing_is_not_answered():
    found = taken(conversation.both_sides([], FRAME, 0.0, random.Random(1)), itertools.repeat(END))

    assert [writer for _, writer in found] == [GIVEN, GIVEN, GIVEN, MESSAGE]


def test_samples_follow_the_softmax():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)).expand(4000, -1)

    found = write.sample(logits / 0.5, torch.Generator().manual_seed(3))

    shares = torch.bincount(found, minlength=300) / 4000
    assert (shares - (logits[0] / 0.5).softmax(-1)).abs().max() < 0.03


def test_a_draft_is_trained_for_the_heads_tokens_and_keeps_the_embedding(
    shards: Path, target: Path, tmp_path: Path, monkeypatch
):
    draft = tmp_path / "draft"
    monkeypatch.setattr(training_loop.time, "monotonic", map(float, itertools.count()).__next__)
    options = {"target": target, "data": shards, "held-out": shards, "out": draft, "layers": "0,2", "head": 40,
               "minutes": 0.05, "batch": 4, "threads": 1}  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["distil", *(f"--{name}={value}" for name, value in options.items())])

    distil.main()

    before, after = network.load(target), network.load(draft)
    assert len(after.layers) == 2
    torch.testing.assert_close(after.embed_tokens.weight, before.embed_tokens.weight, rtol=1e-3, atol=1e-3)
    assert (
        after.state_dict()["layers.0.mlp.up_proj.weight"] != before.state_dict()["layers.0.mlp.up_proj.weight"]
    ).any()
    tokens = np.load(draft / "head_tokens.npy")
    assert len(tokens) == 40
    assert (np.diff(tokens) > 0).all()


def test_the_target_agrees_with_itself(shards: Path, target: Path):
    model = network.load(target)
    everything = torch.arange(VOCABULARY)

    found = measure.agreement(model, everything, model.embed_tokens.weight.detach(), Answers(shards), 100)

    assert set(found) == {0.0, 0.3, 0.7, 1.0}
    assert all(each.covered == 1 and each.first > 0.98 and each.overlap > 0.99 for each in found.values())
