"""ReDrafter heads (apple/ml-recurrent-drafter: recurrent_drafting/configuration_drafter.py, modeling_drafter.py)."""

from protocol.contracts.drafters.checkpoint import DrafterCheckpoint
from protocol.contracts.drafters.description import FINAL, Drafter

MODEL_TYPE = "recurrent_drafting_drafter"
_MOST_LAYERS = 16


def redrafter(found: DrafterCheckpoint) -> Drafter:
    """Raises InputError for what does not fit together."""
    width, vocabulary = found.number("hidden_size"), found.number("vocab_size")
    exit_width, layers = found.number("exit_dim"), found.number("num_draft_layers", least=0)
    if layers > _MOST_LAYERS:
        raise found.wrong(f"its config.json states num_draft_layers {layers}, of {_MOST_LAYERS} at most")
    for layer in range(layers):
        found.require(f"lm_head.{layer}.linear.weight", (exit_width, exit_width))
    head, drafted = f"lm_head.{layers}.weight", found.head_tokens()
    found.require(head, (vocabulary, exit_width))
    if exit_width != 2 * width:
        found.require("input_proj.weight", (exit_width, 2 * width))
    if found.config.get("rnn"):
        found.require("rnn_u.weight", (width, width))
        found.require("rnn_w.weight", (width, width))
    return Drafter(
        kind="redrafter",
        format="Apple",
        width=width,
        count=1,
        stated_outputs=(FINAL,),
        target_vocabulary=vocabulary,
        drafted=drafted,
        layers=layers,
        parameters=found.parameters(),
        read=found.parameters(by_token=(head,), tokens=drafted),
        own_head=True,
    )
