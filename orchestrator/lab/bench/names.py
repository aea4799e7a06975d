"""The names of contenders: a line of the table, and K for a line that is measured with several chain lengths. Pure."""

import re

PLAIN = "mlx-lm"
"""mlx-lm on all cores: the baseline of the ratios. With a K it is mlx-lm's speculative decoding."""
TARGET_CORES = "mlx-lm, target's cores"
"""mlx-lm on the cores that our target has."""
AUTOREGRESSIVE = "ar"
LOOKUP = "lookup"
"""`adaptive` with the n-gram engine: prompt lookup alone."""
ONE_DEVICE = "adaptive, one device"
"""`adaptive` whose draft computes on the target's device, in turns."""
CORE_ML_DRAFT = "adaptive, Core ML draft"
"""`adaptive` with the draft converted for Core ML."""
WITHOUT_LOOKUP = "adaptive, no lookup"
RANDOM_DRAFT = "random draft"
"""`adaptive` with a draft that costs as much as the real one and guesses at random."""
LLAMA_CPP = "llama.cpp"
_NAME = re.compile(r"(?P<line>.*) K=(?P<draft_tokens>\d+)")


def contender_name(line: str, draft_tokens: int | None) -> str:
    """`sd K=2`; the line alone without a K."""
    return line if draft_tokens is None else f"{line} K={draft_tokens}"


def line_and_draft_tokens(contender: str) -> tuple[str, int | None]:
    """The inverse: the line, and K or None. Contenders of one line differ only in K."""
    found = _NAME.fullmatch(contender)
    return (contender, None) if found is None else (found["line"], int(found["draft_tokens"]))
