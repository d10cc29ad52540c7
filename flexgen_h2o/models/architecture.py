"""What is known of a family of models without computing anything: which models there are, and what they are made of.

Without torch, which plans do not need. The mathematics are in models/base.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from flexgen_h2o.plan.model_shape import ModelShape


class Architecture(ABC):
    """Facts of a family.

    Attributes:
        name: `model_type` of config.json.
        owner: who publishes its models on the Hugging Face hub.
        sizes: names of published models, which can be planned for without any file.
        second_mlp_matrix: the matrix of a layer that multiplies what the MLP's activation gave.
    """

    name: ClassVar[str]
    owner: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ()
    second_mlp_matrix: ClassVar[str]

    @classmethod
    @abstractmethod
    def read(cls, config: Mapping[str, Any], name: str, source: str) -> ModelShape:
        """The model that a parsed config.json describes.

        Args:
            source: the file, for messages.
        Raises UsageError with every mistake found in it.
        """

    @classmethod
    @abstractmethod
    def published(cls, name: str, changes: Mapping[str, Any]) -> ModelShape:
        """A published model, by one of the names in `sizes`, with some settings of its config.json changed."""

    @classmethod
    @abstractmethod
    def config_values(cls, shape: ModelShape) -> dict[str, Any]:
        """The config.json of a model, as transformers reads it."""

    @staticmethod
    def parameter_name(key: str) -> str:
        """The name, relative to the decoder, of a checkpoint's key."""
        return key.removeprefix("model.")

    @staticmethod
    def checkpoint_key(name: str) -> str:
        """The key under which published checkpoints have a parameter."""
        return f"model.{name}"
