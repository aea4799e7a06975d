"""What is known of the families of models: a file each, or one for a few that write alike. This is the list of them.

Harmony is gpt-oss' own format of a whole answer: thoughts and calls have none of these markers.
"""

from orchestrator.text.answer.parsers import ThoughtMarkers
from orchestrator.text.families import deepseek, gemma, glm, kimi, lfm, llama, minimax, mistral, qwen

THOUGHTS = (
    qwen.THOUGHT,  # also of DeepSeek, GLM, MiniMax, and most others
    glm.LONGCAT_THOUGHT,
    ThoughtMarkers("<|think:start|>", "<|think:end|>"),  # Solar
    mistral.THOUGHT,
    ThoughtMarkers("<seed:think>", "</seed:think>"),  # Seed-OSS
    ThoughtMarkers("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A, of Cohere
    ThoughtMarkers("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    gemma.THOUGHT,
    kimi.K3_THOUGHT,
)
"""The first markers that a model has count."""

SYNTAXES = (
    qwen.JSON_SYNTAX,
    minimax.MINIMAX,
    gemma.GEMMA,
    gemma.FUNCTION_GEMMA,
    glm.LONGCAT,
    glm.GLM,
    lfm.LFM,
    qwen.FENCED,
    qwen.CODER,
    kimi.K2,
    minimax.MINICPM,
    mistral.MISTRAL,
    llama.LLAMA,
    minimax.MUSE_SPARK,
    kimi.K3,
    deepseek.DEEPSEEK,
)
"""The first syntax that a template shows counts, as in mlx-lm's `_infer_tool_parser`, which has no DeepSeek."""
