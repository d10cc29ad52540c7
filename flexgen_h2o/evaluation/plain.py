"""The plain path: all entries stay, and a policy says which of them a token may attend to.

For policies that are no rule about scores, and for upper bounds that no cache of fixed size could reach. Nothing is
saved here, neither memory nor time. The text is known, so each layer is computed for all of its tokens at once; only
attention after the prompt goes token by token, since what a policy keeps depends on what was attended to before.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.models.base import Parameters
from flexgen_h2o.models.registry import family_of
from flexgen_h2o.plan.model_shape import ModelShape

# Logits of attention that are held at once, rows x heads x queries x columns.
LOGITS_AT_ONCE = 2**22


@dataclass(frozen=True)
class LayerAttention:
    """What one layer's attention starts from, for a policy to choose by.

    Attributes:
        layer: its number.
        prompt_len: columns of the prompt; those behind it are decoded.
        queries, keys: [rows, heads, columns, head_dim] of all columns, also of those that a cache would not know yet;
            queries are scaled.
    """

    layer: int
    prompt_len: int
    queries: Tensor
    keys: Tensor

    def weights(self, start: int, stop: int) -> Tensor:
        """What the queries from column `start` up to `stop` give each column, if everything is kept.

        Returns: [rows, heads, stop - start, stop] float32.
        """
        logits = self.queries[:, :, start:stop] @ self.keys[:, :, :stop].transpose(2, 3)
        future = torch.ones(stop - start, stop, dtype=torch.bool, device=logits.device).triu(start + 1)
        return logits.float().masked_fill_(future, -torch.inf).softmax(dim=-1)

    def prompt_sums(self) -> Tensor:
        """What each column of the prompt receives from all of its queries: [rows, heads, prompt_len] float32."""
        rows, heads, _, _ = self.queries.shape
        total = torch.zeros(rows, heads, self.prompt_len, device=self.queries.device)
        chunk = max(1, LOGITS_AT_ONCE // (rows * heads * self.prompt_len))
        for start in range(0, self.prompt_len, chunk):
            stop = min(start + chunk, self.prompt_len)
            total[:, :, :stop] += self.weights(start, stop).sum(dim=2)
        return total


class PlainPolicy(ABC):
    """Says what the tokens after the prompt may attend to, one layer after the other."""

    name: ClassVar[str]

    @abstractmethod
    def begin(self, attention: LayerAttention) -> None:
        """Starts a layer: the prompt has been computed, with everything kept."""

    @abstractmethod
    def allowed(self, column: int, logits: Tensor) -> Tensor:
        """What the token at `column` may attend to.

        Args:
            logits: [rows, heads, column + 1] float32, of its query with every column up to its own.
        Returns: bool, of the same shape.
        """

    def observe(self, column: int, weights: Tensor) -> None:  # noqa: B027
        """Takes note of the weights [rows, heads, column + 1] with which the token has attended, if it has to."""


@dataclass(frozen=True)
class PlainPrompt:
    """A computed prompt, the same for every policy.

    Attributes:
        layers: queries, keys and values of each, [rows, heads, prompt_len, head_dim].
        last_hidden: [rows, 1, hidden_size], the residual stream after the last layer, of the last token.
    """

    layers: list[tuple[Tensor, Tensor, Tensor]]
    last_hidden: Tensor

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2]


class PlainModel:
    """A model whose weights are all in memory.

    Args:
        outer, pages: the parameters outside the layers, and those of each layer, on the device.
    """

    def __init__(self, config: ModelShape, outer: Parameters, pages: Sequence[Parameters], device: torch.device):
        self._config = config
        self._family = family_of(config)
        self._device = device
        self._outer = outer
        self._pages = pages

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> PlainPrompt:
        """Computes prompts of one length, [rows, prompt_len] int64."""
        hidden, positions = self._embed(ids, 0)
        workspace = self._workspace(len(hidden), hidden.itemsize)
        computed = []
        for page in self._pages:
            workspace.clear()
            query, key, value = (t.clone() for t in self._project(hidden, positions, page, workspace, len(ids)))
            attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
            hidden = self._family.finish_layer(hidden, _by_token(attended), page, workspace)
            computed.append((query, key, value))
        return PlainPrompt(computed, hidden.unflatten(0, (len(ids), -1))[:, -1:].clone())

    def _project(
        self, hidden: Tensor, positions: Tensor, page: Parameters, workspace: Workspace, rows: int
    ) -> Iterator[Tensor]:
        """Queries, keys and values, [rows, heads, n, head_dim] each."""
        query, key, value = self._family.project_qkv(hidden, positions, page, workspace)
        for by_token in (query.flatten(1, 2), key, value):
            yield by_token.unflatten(0, (rows, -1)).transpose(1, 2)

    @torch.inference_mode()
    def logits(self, prompt: PlainPrompt, following: Tensor, policy: PlainPolicy) -> Tensor:
        """Logits for the token after the prompt and after each of `following`, [rows, tokens] int64.

        Returns: [rows, tokens + 1, vocab_size] float32.
        """
        hidden, positions = self._embed(following, prompt.length)
        workspace = self._workspace(len(hidden), hidden.itemsize)
        for layer, (page, earlier) in enumerate(zip(self._pages, prompt.layers, strict=True)):
            workspace.clear()
            now = self._project(hidden, positions, page, workspace, len(following))
            query, key, value = (torch.cat(parts, dim=2) for parts in zip(earlier, now, strict=True))
            attended = _decode(LayerAttention(layer, prompt.length, query, key), value, policy)
            hidden = self._family.finish_layer(hidden, _by_token(attended), page, workspace)
        states = torch.cat((prompt.last_hidden, hidden.unflatten(0, (len(following), -1))), dim=1)
        rows, tokens, size = states.shape
        head_space = self._workspace(rows * tokens, states.itemsize, self._config.vocab_size * 8)
        flat = states.reshape(rows * tokens, size)
        return self._family.logits(flat, self._outer, head_space).view(rows, tokens, -1)

    def _embed(self, ids: Tensor, first_position: int) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens, hidden_size] of [rows, n] ids, and the tokens' positions."""
        positions = torch.arange(first_position, first_position + ids.shape[1], device=self._device).repeat(len(ids))
        return self._family.embed(ids.to(self._device).flatten(), positions, self._outer), positions

    def _workspace(self, tokens: int, itemsize: int, extra_bytes: int = 0) -> Workspace:
        """Enough for a layer over so many tokens, and `extra_bytes` for each of them."""
        config = self._config
        per_token = (8 * config.hidden_size + config.intermediate_size) * itemsize + 64 + extra_bytes
        nbytes = tokens * per_token + 2**16
        return Workspace(torch.empty(nbytes, dtype=torch.uint8, device=self._device))


def _by_token(attended: Tensor) -> Tensor:
    """[rows, heads, n, head_dim] as the families have it, [tokens, heads, 1, head_dim]."""
    return attended.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def walk(attention: LayerAttention, policy: PlainPolicy) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Has every token after the prompt attend to what the policy allows it.

    Yields: (its column; what it may attend to, bool; its weights, float32), both [rows, heads, column + 1].
    """
    prompt_len, columns = attention.prompt_len, attention.keys.shape[2]
    policy.begin(attention)
    logits = (attention.queries[:, :, prompt_len:] @ attention.keys.transpose(2, 3)).float()
    for step, column in enumerate(range(prompt_len, columns)):
        seen = logits[:, :, step, : column + 1]
        allowed = policy.allowed(column, seen)
        weights = seen.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        policy.observe(column, weights)
        yield column, allowed, weights


def _decode(attention: LayerAttention, values: Tensor, policy: PlainPolicy) -> Tensor:
    """Attention of every token after the prompt to what the policy allows it.

    Args:
        values: [rows, heads, columns, head_dim].
    Returns: [rows, heads, columns after the prompt, head_dim].
    """
    rows, heads, columns, _ = values.shape
    weights = torch.zeros(rows, heads, columns - attention.prompt_len, columns, device=values.device)
    for column, _, now in walk(attention, policy):
        weights[:, :, column - attention.prompt_len, : column + 1] = now
    return weights.to(values.dtype) @ values
