"""Reads real text out of unpacked packages: subjects, paragraphs, functions, dialogues. Knows no prompts."""

import ast
import hashlib
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PARAGRAPH = range(200, 800)
"""Characters of a paragraph that is used."""
FUNCTION = range(150, 900)
SENTENCE = re.compile(r"[A-Z][^.!?]{30,160}[.!?](?=\s|$)")
MESSAGE = range(8, 300)
MOST_FILES = 250
DOCUMENTS = ("*.rst", "*.txt", "*.md")


class Function(NamedTuple):
    """A Python function and the first line of its docstring, which may be empty."""

    source: str
    summary: str


class Subject(NamedTuple):
    """A noun of WordNet and its definition."""

    name: str
    definition: str


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
