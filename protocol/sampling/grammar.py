"""Which tokens a grammar allows next: llguidance behind a state that follows a token tree.

Knows no model and no logits. What is allowed is a function of the grammar, the tokenizer and the generated tokens
alone. Importing this is cheap; the library is loaded when a grammar is first asked for.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocol.errors import InputError
from protocol.messages.sampling import Grammar
from protocol.sampling.schema_bounds import Schema, SchemaError, parsed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_WHITESPACE = r"(\n[ \t]{0,32}| )"
"""Where JSON may have whitespace. A model that is not sure of itself would otherwise break lines for ever."""
_BETWEEN = "\n"
"""Stands between two of what repeats."""
TokenMask = npt.NDArray[np.bool_]


class GrammarError(Exception):
    """A grammar that can't be had, or is too much for the library at this place; the text says why."""


@lru_cache(maxsize=64)
def flaw(grammar: Grammar) -> str | None:
    """Why this grammar can't be enforced, as a sentence, or None if it can. Takes milliseconds, for the largest
    schemas a few tenths of a second; the last answers are remembered."""
    from llguidance import LLMatcher

    try:
        reason = LLMatcher.validate_grammar(_lark(grammar), limits=_limits())
        if reason:
            # Of the schema alone the library speaks more plainly, if it is the schema that is wrong.
            schema = LLMatcher.grammar_from_json_schema(json.dumps(_with_options(parsed(grammar.schema))))
            reason = LLMatcher.validate_grammar(schema, limits=_limits()) or reason
    except (SchemaError, ValueError) as error:
        reason = str(error)
    return f"This JSON schema can't be enforced: {reason[:1000].rstrip('.')}." if reason else None


class Grammars:
    """One model's tokenizer, in the form that grammars are matched with."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`vocabulary`: tokens the model has logits of."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        """By end tokens: in truth a model has one set of them."""

    def open(self, grammar: Grammar, ends: tuple[int, ...], generated: Sequence[int]) -> "GrammarState":
        """The grammar behind `generated`, after which it allows only `ends`. Raises GrammarError."""
        reason = flaw(grammar)
        if reason is not None:
            raise GrammarError(reason)
        ends = tuple(end for end in ends if end < self._vocabulary)
        if not ends:
            raise GrammarError("This model names no end-of-sequence token, so that no grammar could ever end.")
        state = GrammarState(self._tokenizer(ends), grammar, self._vocabulary, frozenset(ends))
        state.advance(generated)
        if state.failure:
            raise GrammarError(state.failure)
        return state

    def _tokenizer(self, ends: tuple[int, ...]) -> "LLTokenizer":
        if ends not in self._tokenizers:
            from llguidance import LLTokenizer

            try:
                content = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
                self._tokenizers = {ends: LLTokenizer(content, n_vocab=self._vocabulary, eos_token=list(ends))}
            except (OSError, ValueError) as error:
                raise GrammarError(f"This model's tokenizer can't be used with a grammar: {error}") from error
        return self._tokenizers[ends]


class GrammarState:
    """Where one sequence stands in its grammar. Looks ahead along paths without leaving that place."""

    def __init__(self, tokenizer: "LLTokenizer", grammar: Grammar, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self.vocabulary = vocabulary
        """Length of the masks."""
        self._ends = ends
        self._passed: list[int] = []
        """Tokens behind which it stands."""
        self._ended = False
        self.failure = ""
        """Why it stands nowhere, if it does not."""
        self._matcher = self._fresh()

    def advance(self, tokens: Sequence[int]) -> None:
        """These were generated; what stands behind an end is nothing to it. Tokens that it does not allow are a
        failure."""
        rest = [] if self._ended or self.failure else list(takewhile(lambda token: token not in self._ends, tokens))
        self._ended = self._ended or not self._ends.isdisjoint(tokens)
        if self._matcher.try_consume_tokens(rest) < len(rest):
            self.failure = f"The grammar can't be followed: {_reason(self._matcher) or 'the text is not of it'}."
        self._passed += rest

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """(V,) for each path from here: which tokens may follow it; None behind one that has ended or is not allowed.

        Raises GrammarError if the library can't tell, and stands where it stood.
        """
        if self.failure:
            raise GrammarError(self.failure)
        ahead: list[int] = []
        masks: list[TokenMask | None] = [None] * len(paths)
        try:
            # In this order every step is taken once.
            for index in sorted(range(len(paths)), key=lambda index: tuple(paths[index])):
                masks[index] = self._mask() if self._walk(ahead, paths[index]) else None
        finally:
            self._matcher.rollback(len(ahead))
            if self._matcher.is_error():
                # It never leaves that state: begin anew.
                self._matcher = self._fresh()
                self._matcher.try_consume_tokens(self._passed)
        return masks

    def _walk(self, ahead: list[int], path: Sequence[int]) -> bool:
        """Move from behind `ahead`, which is kept true, to behind `path`; whether that is a place in the grammar."""
        if self._ended or not self._ends.isdisjoint(path):
            return False
        shared = _common(ahead, path)
        self._matcher.rollback(len(ahead) - shared)
        del ahead[shared:]
        rest = list(path[shared:])
        passed = self._matcher.try_consume_tokens(rest) if rest else 0
        ahead += rest[:passed]
        return passed == len(rest)

    def _mask(self) -> TokenMask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"The grammar can't be followed from here: {_reason(self._matcher)}.")
        return np.unpackbits(bits, count=self.vocabulary, bitorder="little").view(np.bool_)

    def _fresh(self) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, _lark(self._grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(f"This JSON schema can't be enforced: {_reason(matcher)}.")
        return matcher


def _reason(matcher: "LLMatcher") -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:1000]


def require_enforceable(grammar: Grammar | None) -> None:
    """Raise InputError for one that can't be enforced."""
    reason = None if grammar is None else flaw(grammar)
    if reason is not None:
        raise InputError(reason)


def _lark(grammar: Grammar) -> str:
    """In the language of llguidance (its docs/syntax.md). Raises SchemaError."""
    schema = parsed(grammar.schema)
    if grammar.optional and not grammar.before.strip():
        raise SchemaError("it is to come behind some text of which nothing is said")
    after = _literal(grammar.after)
    lines = [f"value: %json {json.dumps(_with_options(schema))}"]
    if grammar.optional:
        # A lazy lexeme ends where its literal first does, so that no other text can hold that.
        trigger = grammar.before.rstrip()
        gap = _literal(grammar.before[len(trigger) :])
        lines += [r"TEXT: /(.|\n)*/", f"head[lazy]: TEXT {_literal(trigger)}"]
        lines.append(f"start: (head {gap} value {after})* TEXT")
    else:
        again = f"({_literal(_BETWEEN)} one)*" if grammar.repeats else ""
        lines += [f"one: {_literal(grammar.before)} value {after}", f"start: one {again}"]
    return "\n".join(lines)


def _with_options(schema: Schema) -> Schema:
    """Those of the library's own that are not the client's to choose."""
    if isinstance(schema, bool):
        return schema
    theirs = schema.get("x-guidance")
    options = {**(theirs if isinstance(theirs, dict) else {}), "whitespace_pattern": _WHITESPACE}
    return {**schema, "x-guidance": options}


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _limits() -> "LLParserLimits":
    """Of one grammar's memory and time: a tenth to a fifth of the library's own, which still holds 5,000 names."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the shared beginning."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
