"""Lets the target write conversations, and keeps what drafts and drafters learn from: tokens and hidden states.

    python -m orchestrator.lab.training.chat_draft.write --out build/work --shards 100
    python -m orchestrator.lab.training.chat_draft.write --out build/held-out --shards 1 --prompts held_out.jsonl \
        --share 1 --float32

The target writes the messages too (`conversation.both_sides`), but for `--share` of the conversations, whose messages
are those of `--prompts`. The folder is a work folder of `train-draft`: answers/ and states/ in shards of `--rows` rows
of `--length` slots, a row with one text after another. Shards that exist are kept, so the program can be stopped and
started again.
"""

# pyright: reportMissingImports=false
# torch is an optional package: see the extra `training`.

import argparse
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from draft_worker.training.corpus.rows import (
    Answers,
    answers_path,
    save_answers,
    save_states,
    state_outputs,
    states_path,
    stored,
)
from orchestrator.lab.training.chat_draft.conversation import Frame, Writer, Writing, answered, both_sides
from orchestrator.lab.training.chat_draft.decoder import Decoder
from orchestrator.lab.training.chat_draft.target import add_target, target_folder
from orchestrator.lab.training.network import load
from protocol.messages.features import FINAL

TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
USER = "<|im_start|>user\n"
ASSISTANT = "\n<|im_start|>assistant\n"
END = "<|im_end|>"
OUTPUTS = (1, 14, 26)
"""Those that an EAGLE-3 drafter of 30 layers reads."""
OPENED = 0.6
"""Share of the messages that begin with one of the openings."""
BLOCK = 256
"""Probabilities that are summed at a time in sampling."""
_TEXT = """
Write a short story about|Write a poem about|Write a haiku|Write an email to my|Write a cover letter for
Write a review of|Write a speech for|Write a product description for|Write a dialogue between|Write a letter
Write a blog post|Write a song|Compose a|Draft a|Draft an|Help me write|Edit the following paragraph:
Rewrite this sentence|Correct the grammar|Create a slogan for|Create a list of|Create a table
Create a plan for|Describe the|Describe a|Describe how|Imagine you are|Imagine that|Pretend to be|You are a
You are an experienced|Act as a|Act as an|Suppose you|Take the role of|I want you to act as|As a doctor,
As a historian,|Roleplay as|Picture yourself as|What is|What are|What does|What would happen if
What's the difference between|What is the best way to|What should I|Why do|Why does|Why is|Why did|How do
How does|How can I|How many|How much|How to|How is|How was|Who was|Who is|When did|Where is|Which|Is it
Are there|Can you|Could you please|Do you|Does|Should I|Would|Tell me about|Tell me|Explain
Explain the concept of|Explain how|Explain why|Give me|Give an example of|Give three reasons|List|List five
Compare|Compare and contrast|Discuss|Summarize|Summarize the following text:|Summarize this article:|Outline
Analyze|If|If a train|If I have|If x|Given that|Given the following|Given a|A farmer has|A store sells
There are|Tom has|Maria|Solve|Solve for x:|Calculate|Find the|Find all|Prove that|Simplify|Evaluate|Convert
Estimate|The sum of|The area of|Write a Python function|Write a Python program|Write a function that
Write a JavaScript function|Write a SQL query|Write a C++ program|Write a bash script|Write code to
Implement a|Implement an algorithm|Fix this code:|Debug|Here is my code|What does this code do?|How do I sort
In Python, how|Optimize the following|Refactor|Write a unit test|Design a|Develop a|Build a|Generate
Translate the following|Translate this sentence into|Translate into English:|How do you say|Extract the
Extract all|Identify the|Identify|Classify|Classify the following|From the text below,|Read the passage below
Based on the following|Answer the question|Using the information|According to|Here is a paragraph:
Here are some reviews|Evaluate the following|Return the|Format|Sort the|Rank|Turn the following|Count|Name
Suggest|Recommend|Propose|Provide|In the field of|In physics,|In biology,|In chemistry,|In economics,
In literature,|In history,|During the|The theory of|Define|What caused|What were the|Photosynthesis
The French Revolution|The human|Climate change|Machine learning|I have|I am|I'm planning|I need|I need help
I want to|I would like|I am trying to|My|My friend|My boss|We are|hi|hello|hey|Please|please explain
please write|Thanks! Now|Let's|Consider|Assume|Choose|True or false:|Complete the|Continue|Fill in
"""
OPENINGS = tuple(_TEXT.strip().replace("\n", "|").split("|"))
"""First words of messages, so that what the target writes in the user's place is about many things.

Written for this. None of them is from a benchmark.
"""


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    folder = target_folder(options.target)
    target = load(folder)
    conversations = Conversations(Tokenizer.from_file(str(folder / "tokenizer.json")), options)
    outputs = () if options.final_alone else OUTPUTS
    state_outputs(options.out, (*outputs, FINAL))
    precision = torch.float32 if options.float32 else torch.bfloat16
    head = target.embed_tokens.weight.detach()
    temperatures = np.array([TEMPERATURES[row % len(TEMPERATURES)] for row in range(options.rows)], np.float32)
    for number in range(options.first, options.shards, options.every):
        if states_path(options.out, number).exists():
            continue
        began = time.monotonic()
        decoder = Decoder(target, options.rows, precision, outputs)
        answers, states, messages = written(decoder, head, conversations, temperatures, options.length, number)
        answers_path(options.out, number).parent.mkdir(parents=True, exist_ok=True)
        save_answers(options.out, number, answers)
        save_states(options.out, number, states)
        spent = time.monotonic() - began
        print(f"{number}: {answers.own.sum()} own, {messages} of messages, {spent:.0f} s", flush=True)


def arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_target(options, "folder of the model that writes")
    options.add_argument("--prompts", type=Path, help="file of given messages, as `prompts` makes one")
    options.add_argument("--share", type=float, default=0.25, help="of the conversations that have given messages")
    options.add_argument("--longest-prompt", type=int, default=220, help="tokens of all given turns")
    options.add_argument("--out", type=Path, required=True, help="work folder")
    options.add_argument("--shards", type=int, default=100)
    options.add_argument("--first", type=int, default=0, help="with --every: share the shards among processes")
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--rows", type=int, default=128)
    options.add_argument("--length", type=int, default=768)
    options.add_argument("--float32", action="store_true", help="exact, and half as fast: for held-out text")
    options.add_argument("--final-alone", action="store_true", help="keep the last state alone")
    options.add_argument("--threads", type=int, default=2)
    return options.parse_args()


class Conversations:
    """Endless conversations, by a seed."""

    def __init__(self, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        end = tokenizer.token_to_id(END)
        if end is None:
            raise SystemExit(f"the target's tokenizer has no {END}: only ChatML is supported")
        system, user, assistant = (tokenizer.encode(text).ids for text in (SYSTEM, USER, ASSISTANT))
        self._frame = Frame(system, user, assistant, tokenizer.encode("\n" + USER).ids, end)
        self._openings = [tokenizer.encode(text).ids for text in OPENINGS]
        self._share = options.share if options.prompts else 0.0
        self._prompts: list[list[list[int]]] = []
        for line in options.prompts.read_text().splitlines() if options.prompts else ():
            turns = [tokenizer.encode(turn).ids for turn in json.loads(line)["turns"]]
            if sum(map(len, turns)) <= options.longest_prompt:
                self._prompts.append(turns)

    def begin(self, temperature: float, rng: random.Random) -> Writing:
        if rng.random() < self._share:
            return answered(rng.choice(self._prompts), self._frame, temperature)
        opening = rng.choice(self._openings) if rng.random() < OPENED else ()
        return both_sides(opening, self._frame, temperature, rng)


def written(
    decoder: Decoder, head: Tensor, conversations: Conversations, temperatures: np.ndarray, length: int, seed: int
) -> tuple[Answers, np.ndarray, int]:
    """A shard's rows, their states (rows, slots, outputs + 1, size), and how many tokens of messages they have."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    texts = [conversations.begin(float(each), rng) for each in temperatures]
    steps = [next(text) for text in texts]
    rows = len(texts)
    tokens, writers, starts = np.zeros((3, rows, length), np.int32)
    states: np.ndarray | None = None
    half = head.to(torch.bfloat16)
    for slot in range(length):
        here = torch.tensor([step.token for step in steps])
        tokens[:, slot], writers[:, slot] = here, [step.writer for step in steps]
        state = decoder.step(here, slot, torch.from_numpy(starts[:, slot]).long())
        if states is None:
            states = np.empty((rows, length, *state.shape[1:]), np.float16)
        states[:, slot] = stored(state.numpy())
        sampled = choices(state[:, -1], head, half, [step.temperature for step in steps], generator)
        if slot + 1 < length:
            starts[:, slot + 1] = starts[:, slot]
        for row, text in enumerate(texts):
            try:
                steps[row] = text.send(sampled[row])
            except StopIteration:
                texts[row] = conversations.begin(float(temperatures[row]), rng)
                steps[row] = next(texts[row])
                if slot + 1 < length:
                    starts[row, slot + 1] = slot + 1
    assert states is not None
    answers = Answers(tokens, writers == Writer.ANSWER, starts, temperatures)
    return answers, states, int((writers == Writer.MESSAGE).sum())


def choices(
    states: Tensor, head: Tensor, half: Tensor, temperatures: list[float | None], generator: torch.Generator
) -> list[int]:
    """A token a row; 0 where the next one is given. The best one is chosen in fp32, samples are drawn in bf16."""
    result = torch.zeros(len(states), dtype=torch.int64)
    cold = torch.tensor([row for row, each in enumerate(temperatures) if each == 0], dtype=torch.int64)
    warm = torch.tensor([row for row, each in enumerate(temperatures) if each], dtype=torch.int64)
    if len(cold):
        result[cold] = functional.linear(states[cold], head).argmax(-1)
    if len(warm):
        scale = torch.tensor([temperatures[row] for row in warm])[:, None]
        logits = functional.linear(states[warm].to(half.dtype), half).float()
        result[warm] = sample(logits.div_(scale), generator)
    return result.tolist()


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token a row; changes `logits`. Two short cumulative sums instead of one over the vocabulary."""
    shares = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    blocks = functional.pad(shares, (0, -shares.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    block = drawn(blocks.sum(-1), generator)
    return block * BLOCK + drawn(blocks[torch.arange(len(blocks)), block], generator)


def drawn(shares: Tensor, generator: torch.Generator) -> Tensor:
    """An index a row, with probability in proportion to the shares."""
    sums = shares.double().cumsum(-1)
    points = torch.rand(len(shares), 1, generator=generator, dtype=torch.float64) * sums[:, -1:]
    return torch.searchsorted(sums, points, right=True)[:, 0].clamp(max=shares.shape[1] - 1)


if __name__ == "__main__":
    main()
