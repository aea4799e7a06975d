"""`launch-pipeline pairs`: the recommended pairs, with the memory that they take of this machine.

It also finds models that other programs have already put on this disk; it copies nothing and opens no weights. With
`--pair` it shows all drafts that are published for one target.
"""

import json
from collections import Counter
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from orchestrator.cli.pipeline_options import NamedChoice
from orchestrator.cli.printing import print_whole
from orchestrator.cli.sentences import say
from orchestrator.machine.checkpoints import LocalModel, local_models
from orchestrator.machine.default_target import default_pair_state
from orchestrator.machine.hardware import computes_on_processor, gpu_working_set, memory_bytes, neural_engine
from orchestrator.machine.memory.budget import usable
from orchestrator.machine.memory.kv_plan import about
from orchestrator.machine.pairs.recommended_pairs import (
    Model,
    Pair,
    beside,
    first_pair,
    fits,
    kept_tokens,
    memory,
    pairs,
    published,
)

_GIB = 1 << 30


@click.command("pairs")
@click.option(
    "--pair",
    type=NamedChoice(list(published()), "`launch-pipeline pairs`"),
    metavar="NAME",
    help="All drafts that are published for this pair's target, with size, licence and source.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pairs_command(pair: str | None, as_json: bool) -> None:
    """List recommended pairs of target and draft for --pair, with the memory that each takes.

    Below them are models that Hugging Face's tools, LM Studio and Ollama have put on this disk.

    Memory is estimated from the number of weights and their bits; what is left keeps so many tokens of conversations.

    \b
    launch-pipeline pairs
    launch-pipeline pairs --pair qwen3.8-27b
    launch-pipeline generate "Why is the sky blue?" --pair qwen2.5-3b
    """
    if pair is not None:
        _show_drafts(published()[pair].target, as_json)
        return
    on_processor, physical = computes_on_processor(), memory_bytes()
    room = usable(physical, gpu_working_set())
    rows = {name: _facts(pair, on_processor, room) for name, pair in pairs().items()}
    if as_json:
        found = [{"name": name, **facts} for name, facts in rows.items()]
        local = [model._asdict() for model in local_models()]
        default = default_pair_state()._asdict()
        click.echo(json.dumps({"memory": physical, "default": default, "pairs": found, "found": local}))
        return
    rows = _one_a_target(rows)
    fitting = {name: facts for name, facts in rows.items() if facts["fits"]}
    kind = ", as float32 on a processor" if on_processor else ""
    say(f"For this machine. Sizes are estimated{kind}.")
    print_whole(_table(fitting or rows, physical))
    default = f"Without --pair: {first_pair(tools=False) or default_pair_state()}."
    others = "All drafts of a target: `launch-pipeline pairs --pair NAME`."
    for words in (_too_big(rows) if fitting else "", others, default):
        say(words) if words else None
    if local := local_models():
        click.echo("\nAlready on this disk; a GGUF file is converted when it is first used:")
        print_whole(_local_table(local))


def _show_drafts(target: Model, as_json: bool) -> None:
    """All drafts of a target: what they are, and who says so."""
    drafts = {name: pair.draft for name, pair in beside(target).items()}
    if as_json:
        rows = [
            {
                "name": name,
                "draft": draft.id,
                "drafter": draft.kind,
                "format": draft.format or None,
                "size": _stated_size(draft),
                "licence": draft.licence or None,
                "source": draft.source or None,
                "refused": draft.refused or None,
            }
            for name, draft in drafts.items()
        ]
        click.echo(json.dumps({"target": target.id, "drafts": rows}))
        return
    say(f"Drafts for {target.id}:")
    table = Table("name", "draft", "kind", "size", "licence", "source")
    for name, draft in drafts.items():
        kind = draft.kind or "language model"
        table.add_row(*map(Text, (name, draft.id, kind, _stated_size(draft), draft.licence, draft.source)))
    print_whole(table)
    say("None of the trained drafters was tried with this program.")
    refused = [f"{name}: {draft.refused}" for name, draft in drafts.items() if draft.refused]
    if refused:
        say(f"Not run: {'; '.join(refused)}.")


def _stated_size(draft: Model) -> str:
    return draft.size or f"{draft.parameters:g}B"


def _facts(pair: Pair, on_processor: bool, available: int) -> dict[str, Any]:
    return {
        "target": pair.target.id,
        "draft": pair.draft.id,
        "drafter": pair.draft.kind,
        "licence": pair.draft.licence or None,
        "source": pair.draft.source or None,
        "bytes": round(memory(pair, on_processor)),
        "fits": fits(pair, on_processor, available),
        "bytes_with_core_ml": round(memory(pair, on_processor, core_ml=True)),
        "fits_with_core_ml": fits(pair, on_processor, available, core_ml=True),
        "kept_tokens": kept_tokens(pair, on_processor, available),
    }


def _one_a_target(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The first pair of each target, with the number of all."""
    drafts = Counter(facts["target"] for facts in rows.values())
    first: dict[str, str] = {}
    for name, facts in rows.items():
        first.setdefault(facts["target"], name)
    return {name: rows[name] | {"drafts": drafts[target]} for target, name in first.items()}


def _local_table(models: list[LocalModel]) -> Table:
    table = Table("of", "model", "size", "--target")
    for model in models:
        table.add_row(*map(Text, (model.origin, model.name, f"{model.bytes / _GIB:.1f} GiB", model.target)))
    return table


def _too_big(rows: dict[str, dict[str, Any]]) -> str:
    sizes = [f"{name} ({facts['bytes'] / _GIB:.1f} GiB)" for name, facts in rows.items() if not facts["fits"]]
    return f"Too big for this machine: {', '.join(sizes)}." if sizes else ""


def _table(rows: dict[str, dict[str, Any]], physical: int) -> Table:
    table = Table("name", "target", "draft", "drafts", f"memory (of {physical / _GIB:.0f} GiB)")
    for name, facts in rows.items():
        size = f"{facts['bytes'] / _GIB:.1f} GiB, {'fits' if facts['fits'] else '[red]too big[/]'}"
        if neural_engine() is not None:
            fit = "fits" if facts["fits_with_core_ml"] else "too big"
            size += f" (with Core ML {facts['bytes_with_core_ml'] / _GIB:.1f}, {fit})"
        if facts["kept_tokens"] is not None:
            size += f", keeps {about(facts['kept_tokens'])} tokens"
        target, draft = (facts[role].removeprefix("mlx-community/") for role in ("target", "draft"))
        if facts["drafter"] is not None:
            draft += f" ({facts['drafter']})"
        table.add_row(name, target, draft, str(facts["drafts"]), size)
    return table
