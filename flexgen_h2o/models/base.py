"""The mathematics of a family of models, as pure functions of tensors.

Hidden states and positions come by token: one behind the other, whatever sequence each belongs to, so that sequences
may differ in length. Adding a family is such a class, what models/architecture.py asks for, and a line in
models/registry.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from flexgen_h2o.kernels.matrices.layout import Matrix
from flexgen_h2o.memory.workspace import Workspace
from flexgen_h2o.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Parameters:
    """Parameters of a layer, or of what lies outside the layers, where compute can reach them; by relative name.

    Attributes:
        tensors: norms and biases.
        matrices: all others, tables among them.
    """

    tensors: Mapping[str, Tensor]
    matrices: Mapping[str, Matrix]


# Yields the tensors of the given names, relative to the decoder, once each.
TensorSource = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]


class Family(ABC):
    """A family's mathematics, for one model.

    Tensors that are computed lie in the workspace, and are valid until what was taken of it is given back, unless
    something else is said.
    """

    def __init__(self, shape: ModelShape):
        self.shape = shape

    @abstractmethod
    def embed(self, ids: Tensor, positions: Tensor, outer: Parameters) -> Tensor:
        """What enters the first layer; outlives the workspace.

        Args:
            ids: [tokens] int64.
            positions: [tokens] int64, how many real tokens come before each; pads may hold any value from 0 up.
        Returns: [tokens, hidden_size].
        """

    @abstractmethod
    def project_qkv(
        self, hidden: Tensor, positions: Tensor, page: Parameters, workspace: Workspace
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (scaled already), keys and values of one layer.

        Args:
            hidden: [tokens, hidden_size], the residual stream.
            positions: as for embed().
        Returns: [tokens, key heads, query heads that share one, head_dim], and twice [tokens, key heads, head_dim].
        """

    @abstractmethod
    def finish_layer(self, hidden: Tensor, attended: Tensor, page: Parameters, workspace: Workspace) -> Tensor:
        """Attention's output projection, the MLP and the residual additions. Changes `hidden` and returns it.

        Args:
            hidden: [tokens, hidden_size], the residual stream that entered the layer.
            attended: what attention returned, of the shape of the queries.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, outer: Parameters, workspace: Workspace) -> Tensor:
        """Scores of what follows each token.

        Args:
            hidden: [tokens, hidden_size], the residual stream after the last layer.
        Returns: [tokens, vocab_size] float32.
        """
