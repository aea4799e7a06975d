"""Laws of the programs that write a target's answers and train its draft, on a tiny model. They need torch."""

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from orchestrator.tools.training import network, training_loop  # noqa: E402
from orchestrator.tools.training.chat_draft import distil, measure, write  # noqa: E402
from orchestrator.tools.training.chat_draft.decoder import Decoder  # noqa: E402
from orchestrator.tools.training.chat_draft.shards import Answers  # noqa: E402

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
    monkeypatch.setattr(write, "SYSTEM", "")
    monkeypatch.setattr(write, "TURN", "{}")
    run_write(monkeypatch, tmp_path, target)
    return tmp_path / "answers"


def run_write(monkeypatch: pytest.MonkeyPatch, folder: Path, target: Path) -> None:
    options = {"prompts": folder / "prompts.jsonl", "out": folder / "answers", "target": target}
    numbers = ["--shards", "2", "--rows", "6", "--length", "24", "--float32"]
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
    found = steps[-1]

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
    (shards / "shard-0001.npz").unlink()
    before = (shards / "shard-0000.npz").stat().st_mtime_ns

    run_write(monkeypatch, tmp_path, target)

    assert (shards / "shard-0000.npz").stat().st_mtime_ns == before
    assert (shards / "shard-0001.npz").is_file()


def test_a_chat_ends_where_its_answer_loops():
    chat = write.Chat([[7]], END)
    taken = [chat.take(0)]
    while (token := chat.take(len(taken) % 2 + 2)) is not None:
        taken.append(token)

    assert taken[0] == (7, False)
    assert write.LOOP < len(taken) < 20


def test_a_chat_goes_on_with_the_next_turn_and_ends_after_the_last():
    chat = write.Chat([[7], [8, 9]], END)

    taken = [chat.take(token) for token in (0, 5, END, 0, 0, 6, END, 0)]

    assert taken == [(7, False), (5, True), (END, True), (8, False), (9, False), (6, True), (END, True), None]


def test_samples_follow_the_softmax_and_the_coldest_is_the_best():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)).expand(4000, -1)
    generator = torch.Generator().manual_seed(3)

    warm = write.sample(logits, torch.full((4000,), 0.5), generator)
    cold = write.sample(logits, torch.zeros(4000), generator)

    shares = torch.bincount(warm, minlength=300) / 4000
    assert (shares - (logits[0] / 0.5).softmax(-1)).abs().max() < 0.03
    assert (cold == logits[0].argmax()).all()


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

    assert set(found) == {0.0, 0.7, 1.0}
    assert all(each.covered == 1 and each.first > 0.98 and each.overlap > 0.99 for each in found.values())
