"""Whether another process should read a prompt instead of the target: what both were measured to take. Pure."""

from orchestrator.core.options import PrefillMode
from orchestrator.core.policy.estimates import Mean
from protocol.kv.prefix_index import MIN_SHARED_TOKENS

_TRIALS = 2
"""Prompts that a prefill worker gets before it is judged."""
_UNKNOWN_PATIENCE = 30.0
_LEAST_PATIENCE = 1.0


class PrefillChoice:
    """Costs in seconds a token, running means over prompts that are long enough to tell."""

    def __init__(self, mode: PrefillMode) -> None:
        self._mode = mode
        self._target = Mean()
        self._worker = Mean()
        self._adoption = Mean()
        self.trusted = True
        """The present prefill worker has not failed yet."""

    def observe_target(self, evaluated: int, adopted: int, seconds: float) -> None:
        """A target was ready after evaluating or adopting so many tokens."""
        if evaluated >= MIN_SHARED_TOKENS and not adopted:
            self._target.observe(seconds / evaluated)
        elif adopted >= MIN_SHARED_TOKENS and not evaluated:
            self._adoption.observe(seconds / adopted)

    def observe_worker(self, tokens: int, seconds: float) -> None:
        """The prefill worker's offer came so many seconds after it was asked."""
        if tokens >= MIN_SHARED_TOKENS:
            self._worker.observe(seconds / tokens)

    def pays(self, tokens: int, held: int) -> bool:
        """Whether to ask the prefill worker for `tokens` tokens, of which an arena holds the first `held`.

        The worker begins at the first token and the target has to adopt what it says; the target alone
        would begin behind `held`. Until the target was measured it reads prompts itself.
        """
        rest = tokens - held
        if not self.trusted or rest < MIN_SHARED_TOKENS or (self._mode == "auto" and not self._target.count):
            return False
        if self._mode == "always" or self._worker.count < _TRIALS:
            return True
        elsewhere = (self._worker.get(0.0) + self._adoption.get(0.0)) * tokens
        return elsewhere < self._target.get(0.0) * rest + self._adoption.get(0.0) * held

    def patience(self, tokens: int) -> float:
        """Seconds after which the target had better read the prompt itself: twice what either was measured
        to need, at least one."""
        known = [mean.get(0.0) for mean in (self._target, self._worker) if mean.count]
        return max(_LEAST_PATIENCE, 2 * max(known) * tokens) if known else _UNKNOWN_PATIENCE
