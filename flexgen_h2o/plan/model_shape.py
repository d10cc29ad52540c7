"""What a model is made of, whatever its family: sizes, and the name, shape and kind of every parameter.

Plain data that plans are made with. Names of sizes are those of config.json in transformers. A family (models/base.py)
says all of it, and nothing else knows how its parameters are called.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

# Multiplied with, or a table as large as what is; only looked up; or small: norms and biases.
Kind = Literal["matrix", "table", "vector"]
Shapes = dict[str, tuple[int, ...]]

OUTER = -1  # the page of weights that holds what lies outside the decoder layers; layer n is page n


@dataclass(frozen=True)
class ParameterShape:
    """One parameter.

    Attributes:
        name: relative to its layer, or to the decoder for what lies outside the layers.
        shape: [out, in] of a matrix.
        mean: around which made-up values lie: 1 for the weights of norms.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    mean: float = 0.0

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes and parameters. All layers are alike.

    Attributes:
        family: the name under which its mathematics are registered.
        num_key_value_heads: heads of keys and values; each serves as many query heads as the quotient says.
        intermediate_size: elements of a token that the MLP holds between its products.
        layer, outer: parameters of a decoder layer, and of what lies outside the layers.
        head: names of the outer matrices that logits are products with.
        norms_held: normalised vectors of a token that the second half of a layer holds at once.
        activates_in_place: the MLP's activation needs no copy of what it is applied to.
        aliases: (stored, meant): another name under which checkpoints may have a parameter.
        settings: what the family's mathematics need beyond all that; names the architecture as a whole.
    """

    family: str
    name: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    layer: tuple[ParameterShape, ...]
    outer: tuple[ParameterShape, ...]
    head: tuple[str, ...]
    settings: object
    norms_held: int = 1
    activates_in_place: bool = True
    aliases: tuple[tuple[str, str], ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def identity(self) -> str:
        """Names the architecture: equal for equal ones, in every run."""
        return repr(self.settings)

    @property
    def filler_token_id(self) -> int:
        """A valid id for pads and finished rows. Its value never matters: masks come from lengths."""
        pad = self.pad_token_id
        return pad if pad is not None and 0 <= pad < self.vocab_size else 0

    @property
    def qkv_size(self) -> int:
        """Elements of a token's queries, keys and values together."""
        return (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim

    @property
    def qkv_elements(self) -> int:
        """Elements of the matrices that they are products with."""
        return self.qkv_size * self.hidden_size

    @property
    def layer_elements(self) -> int:
        """Elements that a layer multiplies with."""
        return sum(parameter.elements for parameter in self.layer if parameter.kind == "matrix")

    @property
    def head_elements(self) -> int:
        """Elements that the choice of a token multiplies with."""
        return sum(parameter.elements for parameter in self.outer if parameter.name in self.head)

    def page(self, page: int) -> tuple[ParameterShape, ...]:
        """Parameters of a page of weights."""
        return self.outer if page == OUTER else self.layer

    def page_shapes(self, page: int) -> Shapes:
        """Shapes of a page's parameters, named relative to it."""
        return {parameter.name: parameter.shape for parameter in self.page(page)}

    def layer_shapes(self) -> Shapes:
        """Shapes of one decoder layer's parameters, named relative to it."""
        return self.page_shapes(0)

    def outer_shapes(self) -> Shapes:
        """Shapes of the parameters outside the decoder layers, named relative to the decoder."""
        return self.page_shapes(OUTER)

    def parameters(self) -> dict[str, ParameterShape]:
        """Every parameter of the model, by its name relative to the decoder."""
        pages = [OUTER, *range(self.num_hidden_layers)]
        return {full_name(page, parameter.name): parameter for page in pages for parameter in self.page(page)}

    def shapes(self) -> Shapes:
        """The shape of every parameter of the model, by its name relative to the decoder."""
        return {name: parameter.shape for name, parameter in self.parameters().items()}

    def matrix_shapes(self) -> set[tuple[int, int]]:
        """Shapes [out, in] of the model's matrices."""
        return self._shapes_of("matrix")

    def table_shapes(self) -> set[tuple[int, int]]:
        """Shapes of what is two-dimensional and only looked up."""
        return self._shapes_of("table")

    def _shapes_of(self, kind: Kind) -> set[tuple[int, int]]:
        return {(each.shape[0], each.shape[1]) for each in (*self.outer, *self.layer) if each.kind == kind}


def full_name(page: int, name: str) -> str:
    """The name, relative to the decoder, of a parameter of a page."""
    return name if page == OUTER else f"layers.{page}.{name}"
