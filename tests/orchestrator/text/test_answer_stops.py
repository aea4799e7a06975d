"""Laws of stop strings in outputs with thoughts: only the answer is searched, however the output is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text.answer.answer_stops import AnswerStops
from orchestrator.text.stop_scanner import StopScanner
from orchestrator.text.tokenizer import MARK
from protocol.messages.client import ThoughtText

THOUGHT = ThoughtText("<think>", "</think>")
OPENED = ThoughtText("<think>", "</think>", opened=True)
HARMONY = ThoughtText("", "<|channel|>final<|message|>", opened=True)
ANALYSIS = "<|channel|>analysis<|message|>Q?<|end|><|start|>assistant"


def scanned(stops: AnswerStops | StopScanner, pieces: list[str]) -> tuple[str, str | None]:
    """The text that is sent, and the stop string."""
    said = ""
    for piece in pieces:
        text, stopped = stops.push(piece)
        said += text
        if stopped:
            return said, stops.found
    return said + stops.flush(), None


@pytest.mark.parametrize(
    ("thought", "output", "said"),
    [
        (THOUGHT, "<think>Q? Hm.</think>Yes. Q? No.", "<think>Q? Hm.</think>Yes. "),
        (THOUGHT, "\n<think>Q?</think>Q?", "\n<think>Q?</think>"),
        (THOUGHT, "Yes. Q? No.", "Yes. "),
        (THOUGHT, "<thin", "<thin"),
        (THOUGHT, "Yes. <think>Q?", "Yes. <think>"),
        (THOUGHT, f"Yes. {MARK}<think>Q?</think>Q?", f"Yes. {MARK}<think>Q?</think>"),
        (THOUGHT, f"Yes. {MARK}Q?", f"Yes. {MARK}"),
        (OPENED, "Q? Hm.</think>Yes. Q?", "Q? Hm.</think>Yes. "),
        (OPENED, "Q? Hm.", "Q? Hm."),
        (HARMONY, f"{ANALYSIS}<|channel|>final<|message|>Yes. Q?", f"{ANALYSIS}<|channel|>final<|message|>Yes. "),
        (None, "<think>Q?", "<think>"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_stop_strings_are_looked_for_in_the_answer(thought: ThoughtText | None, output: str, said: str, size: int):
    pieces = [output[start : start + size] for start in range(0, len(output), size)]

    assert scanned(AnswerStops(["Q?"], thought), pieces) == (said, "Q?" if said != output else None)


@given(pieces=st.lists(st.text("<think>/Qa \n", max_size=9), max_size=9), opened=st.booleans())
def test_without_stop_strings_every_character_is_sent(pieces: list[str], opened: bool):
    thought = ThoughtText("<think>", "</think>", opened)

    assert scanned(AnswerStops([], thought), pieces) == ("".join(pieces), None)


@given(pieces=st.lists(st.text("abc", max_size=5), max_size=9))
def test_without_a_thought_all_text_is_searched(pieces: list[str]):
    assert scanned(AnswerStops(["ab", "cc"]), pieces) == scanned(StopScanner(["ab", "cc"]), pieces)
