"""Options that change nothing beside the others, each with a sentence that says why. Pure."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from protocol.contracts.engines import NO_DRAFT, draft_engines

Values: TypeAlias = Mapping[str, Any]
"""Options in force by their keywords. One that is missing is not known, so nothing follows from it."""


class IneffectiveOption(UserWarning):
    """An option was given that changes nothing beside the others."""


class Rule(NamedTuple):
    """Where `holds`, an option of `names` changes nothing, because of `reason`."""

    names: tuple[str, ...]
    holds: Callable[[Values], bool]
    reason: str


def ineffective(values: Values, given: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each option in `given` (names with what the user calls them) that changes nothing."""
    for name, called in given.items():
        reason = next((rule.reason for rule in RULES if name in rule.names and rule.holds(values)), None)
        if reason is not None:
            yield f"{called} has no effect: {reason}."


def _is(name: str, *wanted: Any) -> Callable[[Values], bool]:
    return lambda values: name in values and values[name] in wanted


def _is_not(name: str, *wanted: Any) -> Callable[[Values], bool]:
    return lambda values: name in values and values[name] not in wanted


def _all(*conditions: Callable[[Values], bool]) -> Callable[[Values], bool]:
    return lambda values: all(condition(values) for condition in conditions)


def _set(*names: str) -> Callable[[Values], bool]:
    return lambda values: all(values.get(name) is not None for name in names)


def _model_of_engine(values: Values) -> str:
    engine = draft_engines().get(values.get("draft_engine", ""))
    return engine.model if engine else ""


def _coldest(values: Values) -> bool:
    """Whether every temperature is 0. A chat can change its temperature, and requests to a server have their own."""
    temperature = values.get("temperature")
    found = temperature if isinstance(temperature, tuple) else (temperature,)
    return values.get("command") not in ("chat", "serve") and bool(found) and all(each == 0 for each in found)


def _lends(*roles: str) -> Callable[[Values], bool]:
    return _all(_is("command", "attach"), _is("role", *roles))


_SPECULATION = ("draft_tokens", "draft_width", "draft_fan", "max_verify", "fan_budget", "lookup", "fallback", "saguaro")
_DRAFT = ("draft", "draft_engine", "draft_command", "draft_link", *_SPECULATION)
_PIPELINE = (
    *_DRAFT,
    *("strategy", "prefill_engine", "prefill", "concurrent", "turn", "arena_memory", "prefix_cache_memory", "kv_bits"),
    *("disk_cache", "context", "memory_check"),
    *("target_hosts", "record", "pace", "prefill_step_size"),
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_DRAWS = ("draft_temperature", "draft_top_p")
_ASKS = _all(_is("command", "generate", "chat", "serve"), _set("address"))
"""The command asks a pipeline that runs already."""
_replaying = _all(_is("replay", True), _set("pace"))
"""Recorded texts stand in for the bench's target."""


def _no_draft(values: Values) -> bool:
    """There is no draft, and none can come from another machine."""
    return values.get("draft_engine") == NO_DRAFT and values.get("listen") is None


RULES: tuple[Rule, ...] = (
    Rule(_PIPELINE, _ASKS, "the pipeline that is asked runs already, with options of its own"),
    Rule(
        ("target", "pair"), _all(_ASKS, _is("command", "generate")), "the pipeline that is asked has its target already"
    ),
    Rule(
        ("pair", "target_engine", "listen", "announce"),
        _all(_ASKS, _is("command", "serve")),
        "the pipeline that is asked has its workers already",
    ),
    Rule(("models_memory",), _is("several", False), "this server has one model, which stays loaded"),
    Rule(
        ("keep",),
        _all(_is("several", False), _is("embedding_model", None)),
        "this server has one model, which stays loaded",
    ),
    Rule(("pair",), lambda values: {"target", "draft"} <= values.get("flags", set()), "both models are named"),
    Rule(
        ("preset",), lambda values: set(_SAMPLING) <= values.get("flags", set()), "all that it would set is given too"
    ),
    Rule(("quiet",), _is("as_json", True), "JSON comes without text and figures beside it anyway"),
    Rule(("history", "no_history"), _is("terminal", False), "lines are remembered only on a terminal"),
    Rule((*_DRAFT, *_DRAWS), _is("strategy", "ar"), "the strategy ar uses no draft"),
    Rule(("strategy", *_SPECULATION, *_DRAWS), _no_draft, "without a draft the target decodes alone"),
    Rule(("draft",), _is("draft_engine", NO_DRAFT), "there is no draft"),
    Rule(
        ("draft",),
        lambda values: _model_of_engine(values) == "none",
        "the chosen draft engine guesses without a model",
    ),
    Rule(("draft_tokens",), _is("strategy", "adaptive"), "only the strategies sd and ssd use it"),
    Rule(
        ("draft_width", "draft_fan", "max_verify"),
        _is("strategy", "sd", "ssd"),
        "only the strategy adaptive uses it",
    ),
    Rule(("fan_budget", "fallback", "saguaro"), _is("strategy", "sd", "adaptive"), "only the strategy ssd uses it"),
    Rule(("lookup",), _is("strategy", "sd"), "only the strategies adaptive and ssd use it"),
    Rule(
        ("lookup",),
        _all(_is("strategy", "ssd"), _is("fallback", "neural")),
        "on a miss ssd waits for the draft",
    ),
    Rule(("saguaro", *_DRAWS), _is("verification", "coupled"), "only rejection verification uses it"),
    Rule(("saguaro", *_DRAWS), _coldest, "at temperature 0 the draft draws no tokens at random"),
    Rule(("prefill",), _is("prefill_engine", "none"), "there is no prefill engine"),
    Rule(
        ("turn", "concurrent"),
        _is("command", "generate", "chat", "profile"),
        "this command sends one request at a time",
    ),
    Rule(("kv_bits",), _is("target_engine", "none"), "a target of another machine has its own"),
    Rule(("kv_bits",), _lends("draft"), "a draft holds its keys and values as they are"),
    Rule(("prefill_engine",), _lends("draft"), "a draft is lent"),
    Rule(
        ("target",),
        _all(_lends("draft"), lambda values: values.get("draft") is None),
        "the default target's own draft is lent; a trained drafter would need its target's name",
    ),
    Rule(("draft", "draft_engine"), _lends("target", "prefill"), "no draft is lent"),
    Rule(("prefill_engine",), _lends("target"), "a target is lent, which has no engine to choose"),
    Rule(("disk_cache",), _is("arena_memory", 0), "that keeps no KV of ended requests anywhere"),
    Rule(("disk_cache",), _is("target_engine", "none"), "the KV of a target of another machine stays there"),
    Rule(("disk_cache",), _set("target_hosts"), "each machine of a divided target holds a part of its KV"),
    Rule(("turn",), _is("concurrent", 1), "no other request can take the place"),
    Rule(
        ("prefix_cache_memory",), _is("arena_memory", 0), "without memory for arenas no KV of ended requests is kept"
    ),
    Rule(("prefix_cache_memory",), _is("command", "generate"), "no later request can use what it keeps"),
    Rule(("prefix_cache_memory",), _lends("prefill"), "a prefill worker hands over all KV"),
    Rule(
        ("top_p", "top_k", "min_p", "seed"),
        _coldest,
        "at temperature 0 the most probable token is taken",
    ),
    Rule(
        ("verification",),
        _all(_coldest, _is("verification", "rejection")),
        "at temperature 0 both ways of verification accept the same tokens",
    ),
    Rule(("repetition_context",), _is("repetition_penalty", 1.0), "there is no repetition penalty"),
    Rule(("out",), _all(_is("command", "profile"), _is_not("overhead", None)), "the cost of tracing is only printed"),
    Rule(
        ("target",),
        _all(
            _is("command", "doctor"),
            _is("neural_engine", True),
            lambda values: "target" in values.get("flags", set()),
        ),
        "the Neural Engine is examined without a target",
    ),
    Rule(
        ("runtime",),
        _all(_is("command", "doctor"), _is("neural_engine", False)),
        "only the examination of a draft for the Neural Engine uses it",
    ),
    Rule(("draft",), _is("same_model", True), "the target is its own draft"),
    Rule(("target_hosts",), _replaying, "a replayed target has no model to divide"),
    Rule(("replay",), _is("pace", None), "without a pace the target takes its own time"),
    Rule(
        ("verification",),
        _all(_replaying, _is("verification", "rejection")),
        "rejection sampling needs the target's whole distribution, and a recorded text holds its tokens only",
    ),
    Rule(("link_loss",), _is("link_delay", None), "there is no link without a delay"),
    Rule(("link_delay", "link_loss"), _is("strategies", "ar"), "the strategy ar uses no draft"),
)  # fmt: skip
"""The first rule that names an option and holds gives the reason."""
