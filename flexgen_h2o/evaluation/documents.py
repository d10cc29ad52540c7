"""What policies are judged on, as tokens."""

from dataclasses import dataclass, field

from torch import Tensor

from flexgen_h2o.evaluation.recall import RecallSet


@dataclass(frozen=True)
class HeldoutSet:
    """What every policy is judged on.

    Attributes:
        prompt_len: tokens of a prompt, the same in all documents.
        windows: [documents, prompt_len + continuation] running text; no documents if text is not judged.
        recall: documents by kind; empty if recall is not judged.
    """

    prompt_len: int
    windows: Tensor
    recall: dict[str, RecallSet] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the longest document."""
        documents = [self.windows, *(recall.documents for recall in self.recall.values())]
        return max(tensor.shape[1] for tensor in documents)
