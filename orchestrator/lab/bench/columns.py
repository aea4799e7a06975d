"""The columns of `bench`: each is one `Field`, in the order of the table."""

from orchestrator.lab.bench.figures import FEWEST_PROMPTS, BenchRow
from orchestrator.lab.findings import Field

_LARGE = 20.0
"""Tokens/s without decimals in an interval."""


def _compared(row: BenchRow) -> str:
    """Whether its tokens are the reference's."""
    if row.deviating:
        return f"{row.checked - row.deviating}/{row.checked}"
    return "yes" if row.checked else "-"


def _quartiles(row: BenchRow) -> str:
    decimals = 0 if row.quartiles.high >= _LARGE else 1
    return f"{row.quartiles.low:.{decimals}f}..{row.quartiles.high:.{decimals}f}"


def _median(title: str, figure: str, form: str, meaning: str, scale: float = 1.0) -> Field[BenchRow]:
    """`figure`: a name in `figures.FIGURES`."""
    return Field(title, lambda row: row.median(figure), form, meaning, scale)


COLUMNS: tuple[Field[BenchRow], ...] = (
    Field("contender", lambda row: row.contender, always=True),
    Field(
        "tok/s",
        lambda row: row.tokens_per_second,
        ".1f",
        "generated tokens a second, once the prompt is read",
    ),
    Field("quartiles", _quartiles, meaning="of tok/s, over prompts"),
    Field(
        "/mlx-lm",
        lambda row: row.over_best and row.over_best.median,
        ".2f",
        "ratio to mlx-lm at its best, which the title names",
    ),
    Field(
        "95%",
        lambda row: (row.over_best and row.over_best.interval) if row.contender != row.best_baseline else "",
        ".2f",
        f"bootstrap interval of /mlx-lm, from {FEWEST_PROMPTS} prompts on",
    ),
    _median("tok/rd", "tokens_per_round", ".2f", "tokens a round"),
    _median("hits", "hit_rate", ".0%", "share of rounds whose new root had children in the token tree"),
    _median("accept", "acceptance_rate", ".0%", "share of verified draft tokens that were accepted"),
    _median("first", "time_to_first_token", ".0f", "ms to the first token, prefill included", scale=1e3),
    Field(
        "p95",
        lambda row: row.inter_token(0.95),
        ".0f",
        "95% of the gaps between arrivals are shorter, ms; tokens of a round arrive at once",
        scale=1e3,
    ),
    _median("busy", "target_busy", ".0%", "share of the time that the target works"),
    _median("µs", "overhead_per_round", ".0f", "time of a round beyond the target's forward", scale=1e6),
    Field(
        "exact",
        _compared,
        meaning="every token equals the reference's: at temperature 0 mlx-lm's plain decoding, above it our first "
        "strategy",
        always=True,
    ),
    Field(
        "overran",
        lambda row: row.overruns,
        ".1%",
        "share of forwards that took longer here than on the profile's device; more than 1% is invalid",
    ),
)
