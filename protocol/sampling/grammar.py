"""Which tokens a grammar allows next: llguidance behind a state that looks ahead along a token tree.

Knows no model and no logits. The allowed tokens are a function of the grammar, the tokenizer and the generated tokens
alone. llguidance is imported on the first use of a grammar; its language is described in its docs/syntax.md.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from msgspec.structs import replace

from protocol.common_prefix import common_prefix
from protocol.json_values import is_object
from protocol.messages.grammar import Calls, Form, Grammar, Json, OneOf, Part, Several, Text, Thought
from protocol.sampling.schema_bounds import Schema, SchemaError, closed, parsed
from protocol.sampling.schema_words import in_known_words
from protocol.sampling.thought import AnyText, ThoughtState, TokenMask, TokenRules

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer


class GrammarError(Exception):
    """A grammar can't be enforced, or the library's limits are exceeded; the text gives the reason."""


@lru_cache(maxsize=64)
def flaw(grammar: Grammar) -> str | None:
    """Why this grammar can't be enforced, as a sentence; None if it can. Takes milliseconds, a few tenths of a second
    for the largest schemas. Results are cached."""
    from llguidance import LLMatcher

    if grammar.thought is not None and (reason := _flaw_of_thought(grammar.thought, not grammar.free)):
        return reason
    if grammar.free and grammar.thought is not None:
        return None
    try:
        reason = LLMatcher.validate_grammar(lark(grammar), limits=_limits())
        if reason:
            reason = _flaw_of_schemas(grammar) or reason
    except (SchemaError, ValueError) as error:
        reason = str(error)
    except (AttributeError, LookupError, TypeError, re.error) as error:
        reason = f"something in it is of a wrong type ({error})"
    if reason and "regex" in reason:
        reason = f"a pattern is beyond the library: {' '.join(reason.split())}"
    return f"This JSON schema can't be enforced: {reason[:1000].rstrip('.')}." if reason else None


def _flaw_of_schemas(grammar: Grammar) -> str:
    """For a schema alone, the library gives a clearer reason. Empty if each can be enforced."""
    from llguidance import LLMatcher

    forms = () if grammar.calls is None else grammar.calls.forms
    for text in (grammar.schema, *chain.from_iterable(map(_schemas, forms))):
        if text:
            schema = LLMatcher.grammar_from_json_schema(json.dumps(with_options(parsed(text))))
            if reason := LLMatcher.validate_grammar(schema, limits=_limits()):
                return reason
    return ""


def _schemas(form: Form) -> Iterator[str]:
    for part in form:
        if isinstance(part, Json):
            yield part.schema
        elif isinstance(part, OneOf | Several):
            forms = part.forms if isinstance(part, OneOf) else (part.form,)
            yield from chain.from_iterable(map(_schemas, forms))


def _flaw_of_thought(thought: Thought, before_schema: bool) -> str | None:
    if thought.again and before_schema:
        return "No thought can follow in a text that is held to a schema."
    whole = not thought.closing or thought.closing[-len(thought.end) :] == thought.end
    return None if whole else "What closes a thought must end with its end marker."


class Grammars:
    """One model's tokenizer, in llguidance's form."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`vocabulary`: the number of the model's logits."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}
        """By end tokens. Only the last one is kept: a model has one set of end tokens."""

    def open(self, grammar: Grammar, ends: tuple[int, ...], generated: Sequence[int]) -> TokenRules:
        """The state behind the `generated` tokens. At its end only `ends` are allowed. Raises GrammarError."""
        reason = flaw(grammar)
        if reason is not None:
            raise GrammarError(reason)
        ends = tuple(end for end in ends if end < self._vocabulary)
        if not ends:
            raise GrammarError("This model has no end-of-sequence token, so no grammar can end.")
        state = self._state(grammar, ends)
        state.advance(generated)
        if state.failure:
            raise GrammarError(state.failure)
        return state

    def _state(self, grammar: Grammar, ends: tuple[int, ...]) -> TokenRules:
        thought = grammar.thought
        if thought is None:
            return self._answer(grammar, ends)
        if max((*chain(*thought.starts), *thought.end, *thought.closing)) >= self._vocabulary:
            raise GrammarError("The markers of a thought are beyond this model's vocabulary.")
        behind = self._answer(grammar, ends)
        without = behind if thought.opened else self._answer(replace(grammar, thought=None), ends)
        return ThoughtState(thought, behind, without, self._vocabulary, frozenset(ends))

    def _answer(self, grammar: Grammar, ends: tuple[int, ...]) -> TokenRules:
        if grammar.free:
            return AnyText(self._vocabulary, frozenset(ends))
        return GrammarState(self._tokenizer(ends), grammar, self._vocabulary, frozenset(ends))

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
    """The position of one sequence in its grammar. Looks ahead along paths without moving."""

    def __init__(self, tokenizer: "LLTokenizer", grammar: Grammar, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._grammar = grammar
        self.vocabulary = vocabulary
        """Length of the masks."""
        self._ends = ends
        self._consumed: list[int] = []
        """Tokens up to the position."""
        self._ended = False
        self.failure = ""
        """The reason why the generated tokens left the grammar; empty if they did not."""
        self._matcher = self._new_matcher()

    def advance(self, tokens: Sequence[int]) -> None:
        """Move behind these generated tokens, up to the first end token. Sets `failure` if the grammar does not allow
        them."""
        rest = [] if self._ended or self.failure else list(takewhile(lambda token: token not in self._ends, tokens))
        self._ended = self._ended or not self._ends.isdisjoint(tokens)
        if self._matcher.try_consume_tokens(rest) < len(rest):
            self.failure = f"The grammar can't be followed: {_reason(self._matcher) or 'the text does not match it'}."
        self._consumed += rest

    def allowed(self, paths: Sequence[Sequence[int]]) -> list[TokenMask | None]:
        """The (V,) mask of tokens that may follow each path from this position; None if the path has ended or is not
        allowed. The position does not change. Raises GrammarError if the library fails.
        """
        if self.failure:
            raise GrammarError(self.failure)
        ahead: list[int] = []
        masks: list[TokenMask | None] = [None] * len(paths)
        try:
            # In this order, the matcher consumes each shared prefix once.
            for index in sorted(range(len(paths)), key=lambda index: tuple(paths[index])):
                masks[index] = self._mask() if self._walk(ahead, paths[index]) else None
        finally:
            self._matcher.rollback(len(ahead))
            if self._matcher.is_error():
                # A matcher stays in its error state.
                self._matcher = self._new_matcher()
                self._matcher.try_consume_tokens(self._consumed)
        return masks

    def _walk(self, ahead: list[int], path: Sequence[int]) -> bool:
        """Move the matcher from `ahead` to `path` and update `ahead`. Returns whether the grammar allows `path`."""
        if self._ended or not self._ends.isdisjoint(path):
            return False
        shared = common_prefix(ahead, path)
        self._matcher.rollback(len(ahead) - shared)
        del ahead[shared:]
        rest = list(path[shared:])
        consumed = self._matcher.try_consume_tokens(rest) if rest else 0
        ahead += rest[:consumed]
        return consumed == len(rest)

    def _mask(self) -> TokenMask:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(f"The grammar can't be followed from here: {_reason(self._matcher)}.")
        return np.unpackbits(bits, count=self.vocabulary, bitorder="little").view(np.bool_)

    def _new_matcher(self) -> "LLMatcher":
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, lark(self._grammar), log_level=0, limits=_limits())
        if matcher.is_error():
            raise GrammarError(f"This JSON schema can't be enforced: {_reason(matcher)}.")
        return matcher


def _reason(matcher: "LLMatcher") -> str:
    return matcher.get_error().removesuffix("<non-verbose/>").strip()[:1000]


def _limits() -> "LLParserLimits":
    """Limits of one grammar's memory and time: a tenth to a fifth of the defaults, enough for 5,000 property names."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)


PartT = TypeVar("PartT", Json, Text)
_WHITESPACE = r"(\n[ \t]{0,32}| )"
"""Whitespace allowed between JSON tokens. Without a bound, an uncertain model can generate line breaks forever."""


def lark(grammar: Grammar) -> str:
    """The whole grammar. Raises SchemaError."""
    calls, rules = grammar.calls, _Rules()
    if calls is None:
        answer = rules.form((Json(grammar.schema),))
    else:
        form = rules.one_of(calls.forms)
        again = f"({rules.form(calls.separator)} {rules.form(calls.start)} {form})*" if calls.repeats else ""
        rest = f"{form} {again} {rules.form(calls.closing)}"
        if calls.optional:
            answer = f"({_head(calls, rules)} {rest})* {rules.text(Text())}"
        else:
            answer = f"{rules.form(calls.opening)} {rules.form(calls.start)} {rest}"
            if grammar.schema:
                answer = f"({rules.form((Json(grammar.schema),))} | {answer})"
    if grammar.thought is not None and not grammar.optional:
        # Models write line breaks between a thought and the answer.
        answer = rf"(/[ \t\r\n]{{1,8}}/)? {answer}"
    return "\n".join([*rules.lines, f"start: {answer}"])


class _Rules:
    """Parts of a grammar as expressions. What needs a name is defined in `lines`."""

    def __init__(self) -> None:
        self.lines = ["ANY: /(.|\\n)*/"]
        self._names: dict[Json | Text, str] = {}

    def one_of(self, forms: Sequence[Form]) -> str:
        some = " | ".join(self.form(form) for form in forms if form)
        # A group without content can't be written.
        return f"({some}){'?' if () in forms else ''}" if some else ""

    def form(self, parts: Form) -> str:
        return " ".join(map(self._part, parts))

    def text(self, part: Text) -> str:
        """Greedy, or up to the end. A lazy lexeme ends at the first occurrence of its literal."""
        name = self._named(part, _text)
        return name if part.token is None else f"({name.upper()} <[{part.token}]> | {name})"

    def _part(self, part: Part) -> str:
        match part:
            case str():
                return json.dumps(part)
            case int():
                return f"<[{part}]>"
            case Json():
                return self._named(part, _value)
            case Text():
                return self.text(part)
            case OneOf():
                return self.one_of(part.forms)
            case Several():
                form = self.form(part.form)
                return f"({form} ({self.form(part.separator)} {form})*)?"

    def _named(self, part: PartT, definition: Callable[[str, PartT], Sequence[str]]) -> str:
        if part not in self._names:
            self._names[part] = name = f"part{len(self._names)}"
            self.lines += definition(name, part)
        return self._names[part]


def _value(name: str, value: Json) -> Sequence[str]:
    return [f"{name}: %json {json.dumps(with_options(parsed(value.schema)))}"]


def _text(name: str, text: Text) -> Sequence[str]:
    body = " & ".join(["ANY", *(f"~(ANY {json.dumps(never)} ANY)" for never in text.never)])
    end = f" {json.dumps(text.end)}" if text.end else ""
    return [f"{name.upper()}: {body}", f"{name}{'[lazy]' if end else ''}: {name.upper()}{end}"]


def _head(calls: Calls, rules: _Rules) -> str:
    """Any text up to and with the beginning of a call. Raises SchemaError."""
    first, *rest = *calls.opening, *calls.start, ""
    if not isinstance(first, str | int):
        raise SchemaError("optional calls must begin with a fixed text")
    letters = calls.letters if isinstance(first, int) else first
    trigger = letters.rstrip()
    if not trigger:
        raise SchemaError("optional calls need a text before them")
    behind = (letters[len(trigger) :],) if trigger != letters else ()
    token = f"{rules.text(Text())} {rules.form((first,))} | " if isinstance(first, int) else ""
    # TEXT can't contain the trigger, at which its lexeme would end.
    return f"({token}{rules.form((Text(trigger), *behind))}) {rules.form(tuple(rest[:-1]))}"


def with_options(schema: Schema) -> Schema:
    """The schema with llguidance's options that the client may not choose, and with objects that end."""
    schema = closed(in_known_words(schema))
    if isinstance(schema, bool):
        return schema
    given = schema.get("x-guidance")
    options = {**(given if is_object(given) else {}), "whitespace_pattern": _WHITESPACE}
    return {**schema, "x-guidance": options}
