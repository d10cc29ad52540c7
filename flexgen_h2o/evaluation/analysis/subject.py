"""What is analysed: a model that reads documents with everything kept, and how its attention is looked at."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flexgen_h2o.evaluation.plain import LayerAttention
from flexgen_h2o.evaluation.policies import entries_of
from flexgen_h2o.evaluation.scoring import Judge, plain_model
from flexgen_h2o.llm import LLM

# Attention weights that are held at once, rows x heads x queries x columns.
WEIGHTS_AT_ONCE = 2**24

Result = dict[str, Any]  # what an analysis has found, as JSON


@dataclass(frozen=True)
class Reading:
    """What one layer does with a batch of documents.

    Attributes:
        ids: [rows, n] int64, the documents.
        attention: its queries and keys, of which none is evicted.
        values: [rows, heads, n, head_dim].
        share: of all documents, which are in the batch.
    """

    ids: Tensor
    attention: LayerAttention
    values: Tensor
    share: float

    @property
    def layer(self) -> int:
        return self.attention.layer

    def weights(self) -> Tensor:
        """What every token gives every other: [rows, heads, n, n] float32, 0 for those behind it."""
        return self.attention.weights(0, self.ids.shape[1])


@dataclass(frozen=True)
class Subject:
    """A model, and documents for it to read.

    Attributes:
        judge: scores texts with the model.
        windows: [documents, length] int64, each with the leading token in front.
        budget: what evicting policies keep, as a share of the prompt.
    """

    llm: LLM
    judge: Judge
    windows: Tensor
    budget: float

    @property
    def prompt_len(self) -> int:
        """Tokens of a document that are computed before any is evicted."""
        return self.judge.prompt_len

    @property
    def length(self) -> int:
        """Tokens of a document."""
        return self.windows.shape[1]

    @property
    def layers(self) -> int:
        return self.llm.config.num_hidden_layers

    @property
    def entries(self) -> int:
        """Entries that the budget comes to."""
        return entries_of(self.budget, self.prompt_len)

    def readings(self, documents: Tensor | None = None, prompt_len: int | None = None) -> Iterator[Reading]:
        """What every layer does with some documents, batch by batch and layer by layer.

        Args:
            documents: [documents, n] int64; None for the windows.
            prompt_len: tokens of them that count as prompt; None for as many as a window's.
        """
        documents = self.windows if documents is None else documents
        prompt_len = self.prompt_len if prompt_len is None else prompt_len
        model = plain_model(self.llm)
        length = documents.shape[1]
        rows = max(1, WEIGHTS_AT_ONCE // (self.llm.config.num_attention_heads * length**2))
        for batch in documents.split(rows):
            share = len(batch) / len(documents)
            for layer, (queries, keys, values) in enumerate(model.prefill(batch).layers):
                yield Reading(batch, LayerAttention(layer, prompt_len, queries, keys), values, share)
