"""--draft-engine: offers the engines that modules of the draft worker declare."""

from collections.abc import Callable
from typing import Any

import click

from protocol.contracts.engines import NO_DRAFT, offered_engines


def draft_engine_option(
    *parameters: str, optional: bool = False, with_model: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`optional`: also no draft at all. `with_model`: only engines that draft with a model."""
    words = {
        name: engine.help for name, engine in offered_engines().items() if engine.model != "none" or not with_model
    }
    if optional:
        words[NO_DRAFT] = "the target alone"
    return click.option(
        "--draft-engine",
        *parameters,
        type=click.Choice(list(words)),
        default="mlx",
        show_default=True,
        help="; ".join(f"{name}: {word}" for name, word in words.items()) + ".",
    )
