"""Makes prompts of six categories from real text, and holds some texts out for evaluation. Knows no model.

    python -m orchestrator.lab.training.chat_draft.prompts --sources build/sources --out build

`--sources` is a folder of unpacked packages (docs/lab/draft-training.md names them). Writes prompts.jsonl and
held_out.jsonl: one object a line with `id`, `category` and `turns`. A text is in one of the two only.
"""

import argparse
import ast
import hashlib
import json
import random
import re
import textwrap
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

PARAGRAPH = range(200, 800)
"""Characters of a paragraph that is used."""
FUNCTION = range(150, 900)
SENTENCE = re.compile(r"[A-Z][^.!?]{30,160}[.!?](?=\s|$)")
MESSAGE = range(8, 300)
MOST_FILES = 250
DOCUMENTS = ("*.rst", "*.txt", "*.md")
HELD_OUT_SHARE = 20
"""One text in so many is held out."""
MOST_TEXTS = 4000
"""Texts of a kind that are used, for training and evaluation together."""
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese")

ABOUT = (
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "Give me five facts about {}.",
    "How does {} affect people's lives?",
    "Write a short poem about {}.",
    "What are the advantages and disadvantages of {}?",
    "Why is {} important?",
    "Compare {} with {}.",
    "Write a dialogue between two friends about {} and {}.",
    "What do most people get wrong about {}?",
    "Write a blog post introduction on {}.",
    "What is the history of {}?",
    "Give me a title and an outline for an essay on {}.",
    "Ask me three quiz questions about {} and give the answers.",
    "hi! can you help me understand {}",
    "Describe {} for someone who has never heard of it.",
    "Tell me a joke about {}.",
    "Write an email to a colleague about {}.",
    "How is {} related to {}?",
    "Use {} and {} in one paragraph of a novel.",
    "List ten words that have to do with {} and define each.",
    "What questions should I ask an expert on {}?",
    "I have to give a talk on {} tomorrow. Where do I start?",
)
CODE = (
    "Explain what this Python function does:",
    "Write a docstring for this function:",
    "What could go wrong here?",
    "Write unit tests with pytest for this function:",
    "Simplify this code:",
    "Add type annotations:",
    "Rewrite this function in JavaScript:",
    "Review this code and suggest improvements:",
)
TASKS = (
    "Write a Python function for this: {}",
    "How would I do this in Python? {}",
    "Write JavaScript code for this: {}",
    "I need a small Python class. {} Please include an example of its use.",
)
SUMMARIES = (
    "Summarize this in one sentence:",
    "Summarize the following text in three bullet points:",
    "What is the main point of this paragraph?",
    "TL;DR",
    "Rewrite this more simply:",
    "Give this text a title and a summary of at most 20 words:",
    "Explain this to a beginner:",
)
EXTRACTIONS = (
    "List the key terms of this text:",
    "Extract the facts of this text as JSON:",
    "Make a question and answer from this text:",
    "Which nouns does this text contain? Answer with a list.",
    "Classify the tone of this text as formal or informal, and say why:",
    "Fill a table with the columns term and meaning from this text:",
)
FOLLOW_UPS = {
    "summary": ("Summarize that in two sentences.", "Now say it in one line.", "Shorten your answer to 30 words."),
    "extraction": ("List the three key facts of that as JSON.", "Which names and numbers did you mention?"),
    "translation": tuple(f"Translate your answer into {language}." for language in LANGUAGES),
    "chat": ("Can you give an example?", "Why?", "Tell me more.", "Is there another way to look at it?"),
}
Text = TypeVar("Text", bound=Hashable)
Prompt = tuple[str, tuple[str, ...]]
"""Category and turns of the user."""


class Function(NamedTuple):
    """A Python function and the first line of its docstring, which may be empty."""

    source: str
    summary: str


class Subject(NamedTuple):
    """A noun of WordNet and its definition."""

    name: str
    definition: str


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sources", type=Path, required=True)
    options.add_argument("--code", type=Path, nargs="*", default=[], help="more folders of Python files")
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--held-out", type=int, default=33, help="held-out prompts of each category")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    rng = random.Random(arguments.seed)
    train, held_out = [], []
    for text, prompts in texts(arguments.sources, arguments.code, rng):
        (held_out if is_held_out(text) else train).extend(prompts)
    rng.shuffle(train)
    rng.shuffle(held_out)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save(unique(train), arguments.out / "prompts.jsonl")
    save(balanced(unique(held_out), arguments.held_out), arguments.out / "held_out.jsonl")


def texts(folder: Path, code: list[Path], rng: random.Random) -> Iterator[tuple[str, list[Prompt]]]:
    """Each text with its prompts."""
    nouns = sample(subjects(folder), rng)
    for noun in nouns:
        yield noun.name, about(noun, rng.choice(nouns), rng)
    for paragraph in sample(paragraphs(folder), rng):
        yield paragraph, on_paragraph(paragraph, rng)
    for path in (folder, *code):
        for function in sample(functions(path), rng):
            yield function.source, on_function(function, rng)
    for messages in sample(dialogues(folder), rng):
        yield messages[0], [("chat", messages)]
    for number in range(MOST_TEXTS):
        yield f"sum {number}", [("maths", (word_problem(rng),))]


def sample(found: Iterable[Text], rng: random.Random) -> list[Text]:
    kept = list(dict.fromkeys(found))
    return rng.sample(kept, min(MOST_TEXTS, len(kept)))


def about(subject: Subject, other: Subject, rng: random.Random) -> list[Prompt]:
    question = rng.choice(ABOUT).replace("{}", subject.name, 1).replace("{}", other.name)
    category = rng.choice(("chat", *FOLLOW_UPS))
    prompts: list[Prompt] = [(category, (question, rng.choice(FOLLOW_UPS[category])))]
    if rng.random() < 0.3:
        language = rng.choice(LANGUAGES)
        prompts.append(("translation", (f'How do you say "{subject.name}: {subject.definition}" in {language}?',)))
    return prompts


def on_paragraph(paragraph: str, rng: random.Random) -> list[Prompt]:
    prompts: list[Prompt] = [
        ("summary", (rng.choice(SUMMARIES) + "\n\n" + paragraph,)),
        ("extraction", (rng.choice(EXTRACTIONS) + "\n\n" + paragraph,)),
    ]
    if found := sentences(paragraph):
        prompts.append(("translation", (f"Translate to {rng.choice(LANGUAGES)}: {rng.choice(found)}",)))
    return prompts


def on_function(function: Function, rng: random.Random) -> list[Prompt]:
    prompts: list[Prompt] = [("code", (rng.choice(CODE) + "\n\n" + function.source,))]
    head = "\n".join(function.source.splitlines()[: rng.randint(2, 6)])
    prompts.append(("code", (f"Complete this Python function:\n\n{head}",)))
    if len(function.summary) > 25:
        prompts.append(("code", (rng.choice(TASKS).format(function.summary),)))
    return prompts


def word_problem(rng: random.Random) -> str:
    a, b, c = rng.randint(2, 90), rng.randint(2, 40), rng.randint(2, 12)
    name, other = rng.sample(("Anna", "Tom", "Maria", "Li", "Sam", "Fatima", "Ben", "Olga"), 2)
    thing = rng.choice(("apples", "books", "coins", "stickers", "pencils", "cards", "eggs", "tickets"))
    forms = (
        f"What is {a} + {b} * {c}? Show your steps.",
        f"{name} has {a} {thing}. {other} gives {name} {b} bags with {c} {thing} each. How many {thing} are there now?",
        f"A train travels {a} miles in {c} hours. How fast is it, and how far does it go in {b} hours?",
        f"Solve for x: {c}x + {b} = {a}.",
        f"{name} buys {b} {thing} at ${c} each and pays with ${b * c + a}. How much change does {name} get?",
        f"What is {c * 5}% of {a * 10}?",
        f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
        f"{name} is {c} years older than {other}. Together they are {a + c}. How old is each?",
        f"Find the next three numbers: {c}, {c + b}, {c + 2 * b}, {c + 3 * b}. Explain.",
        f"If {c} workers need {b} days for a wall, how long do {c * 2} workers need? Think step by step.",
        f"What is the average of {a}, {b} and {c}?",
        f"Simplify the fraction {c * b}/{c * a}.",
        f"Is {a * c + 1} a prime number? Explain how you check it.",
        f"Convert {a} kilometers to miles and {b} kilograms to pounds.",
    )
    return rng.choice(forms)


def is_held_out(text: str) -> bool:
    """By the text alone, so that the split is the same in every run."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % HELD_OUT_SHARE == 0


def unique(prompts: list[Prompt]) -> list[Prompt]:
    return list(dict.fromkeys(prompts))


def balanced(prompts: list[Prompt], count: int) -> list[Prompt]:
    """The first `count` of each category."""
    by_category: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_category.setdefault(prompt[0], []).append(prompt)
    return [prompt for category in sorted(by_category) for prompt in by_category[category][:count]]


def save(prompts: list[Prompt], path: Path) -> None:
    lines = [
        json.dumps({"id": f"{category}-{number}", "category": category, "turns": turns})
        for number, (category, turns) in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} prompts")


def subjects(folder: Path) -> Iterator[Subject]:
    """Nouns that WordNet gives more than one relation, so that rare names stay out."""
    for file in sorted(folder.rglob("data.noun")):
        for line in file.read_text(errors="replace").splitlines():
            entry, _, gloss = line.partition(" | ")
            fields = entry.split()
            if not gloss or len(fields) < 6 or entry.count(" n 0000") < 3:
                continue
            name = fields[4].replace("_", " ")
            if name.replace(" ", "").isalpha() and len(name) > 3:
                yield Subject(name, gloss.split(";")[0].strip())


def paragraphs(folder: Path) -> Iterator[str]:
    """Running text of documentation, without markup that stands alone."""
    for pattern in DOCUMENTS:
        for file in sorted(folder.rglob(pattern)):
            if not {"doc", "docs"}.isdisjoint(file.parts):
                yield from _paragraphs(file.read_text(errors="replace"))


def sentences(paragraph: str) -> list[str]:
    return SENTENCE.findall(paragraph)


def functions(folder: Path) -> Iterator[Function]:
    """Those of a fixed sample of the files, because parsing takes long."""
    skipped = {"test", "tests", "site-packages", "migrations"}
    files = [file for file in folder.rglob("*.py") if skipped.isdisjoint(file.parts)]
    for file in sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())[:MOST_FILES]:
        yield from _functions(file.read_text(errors="replace"))


def dialogues(folder: Path) -> Iterator[tuple[str, ...]]:
    """What one side of each conversation of chitchat-dataset wrote: two or three messages."""
    for file in sorted(folder.rglob("chitchat_dataset/dataset.json")):
        for conversation in json.loads(file.read_text()).values():
            sides = conversation["messages"]
            own = [" ".join(message["text"] for message in turn) for turn in sides[::2]][:3]
            if len(own) > 1 and all(len(message) in MESSAGE and message.isascii() for message in own):
                yield tuple(own)


def _paragraphs(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", text):
        plain = " ".join(re.sub(r":[\w:+-]+:`~?([^`<]*)(<[^>]*>)?`", r"\1", block).replace("``", "`").split())
        indented = block.startswith((" ", "\t", "..", "*", "-", "#", "="))
        if not indented and len(plain) in PARAGRAPH and plain.isascii() and plain.endswith((".", "!", "?")):
            yield plain


def _functions(text: str) -> Iterator[Function]:
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source) in FUNCTION and source.isascii():
                yield Function(source, (ast.get_docstring(node) or "").partition("\n")[0].strip())


if __name__ == "__main__":
    main()
