"""The form of generated text: a JSON value, calls of functions, a thought before them. Parts of messages."""

from typing import Annotated, TypeAlias

from msgspec import Meta

from protocol.messages.base import MAX_CONTEXT, MAX_FORMS, MAX_MARKER, MAX_PARTS, MAX_SCHEMA, MessagePart, Token

Marker: TypeAlias = Annotated[tuple[Token, ...], Meta(min_length=1, max_length=MAX_MARKER)]


class Thought(MessagePart, frozen=True):
    """A thought that may come before the text of a grammar. It may hold any token but those that end an answer."""

    starts: Annotated[tuple[Marker, ...], Meta(min_length=1, max_length=4)]
    """The ways to begin it."""
    end: Marker
    """The thought ends with the first occurrence."""
    opened: bool = False
    """The prompt ends with a start, so there is a thought. If not, the model may begin one or not."""
    budget: Annotated[int, Meta(ge=0, le=MAX_CONTEXT)] | None = None
    """Most tokens of the thought; then follows `closing`."""
    again: bool = False
    """Without a schema: further thoughts may follow in the text. They share the budget."""
    closing: Annotated[tuple[Token, ...], Meta(max_length=MAX_MARKER)] = ()
    """Ends with `end`; empty stands for `end` alone."""
    calls: Annotated[tuple[Token, ...], Meta(max_length=MAX_MARKER)] = ()
    """Tokens that begin a call. They end the thought too."""


Schema: TypeAlias = Annotated[str, Meta(max_length=MAX_SCHEMA)]
"""A JSON schema, as JSON."""
Literal: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4096)]


class Json(MessagePart, frozen=True, tag="json"):
    """A JSON value that fits a schema."""

    schema: Schema


class Text(MessagePart, frozen=True, tag="text"):
    """Any text up to and with the first occurrence of `end`, or to the end of the answer."""

    end: Annotated[str, Meta(max_length=256)] = ""
    """Empty: the text goes on to the end of the answer."""
    token: Token | None = None
    """The id of `end` if it is a token of its own. Its letters in other tokens end the text too."""
    never: Annotated[tuple[Literal, ...], Meta(max_length=8)] = ()
    """What is not in the text, because it would be read as a marker."""


class OneOf(MessagePart, frozen=True, tag="one_of"):
    """One of several forms. An empty one stands for nothing."""

    forms: Annotated[tuple["Form", ...], Meta(min_length=1, max_length=MAX_FORMS)]


class Several(MessagePart, frozen=True, tag="several"):
    """Any number of a form, also none, with `separator` between them."""

    form: "Form"
    separator: "Form" = ()


Part: TypeAlias = Literal | Token | Json | Text | OneOf | Several
"""A string is a fixed text. A number is the id of a marker that is a token of its own: that token, and not its
letters."""
Form: TypeAlias = Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)]
"""Parts that follow one another."""


class Calls(MessagePart, frozen=True):
    """Calls of functions as one model writes them: `opening`, then calls with `separator` between them, `closing`. Each
    call is `start` and one of `forms`."""

    forms: Annotated[tuple[Form, ...], Meta(min_length=1, max_length=MAX_FORMS)]
    opening: Form = ()
    start: Form = ()
    separator: Form = ()
    closing: Form = ()
    repeats: bool = False
    """There may be several calls."""
    optional: bool = False
    """Any text may come first, or alone. Calls are enforced from the first text or token on that begins them, which is
    the first part of `opening` and `start`."""
    letters: Annotated[str, Meta(max_length=256)] = ""
    """Of the token that begins optional calls: in other tokens, they begin one too."""


class Grammar(MessagePart, frozen=True):
    """The form of generated text: a JSON value that fits `schema`, or calls, or either."""

    schema: Schema
    """Empty for no such value. Without calls, any text may then follow a thought. Not with optional calls."""
    calls: Calls | None = None
    thought: Thought | None = None
    """What may come first."""

    @property
    def optional(self) -> bool:
        """Whether any text may come, and calls in it."""
        return self.calls is not None and self.calls.optional

    @property
    def free(self) -> bool:
        """Whether nothing is enforced behind the thought."""
        return not self.schema and self.calls is None
