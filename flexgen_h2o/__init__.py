"""Throughput-oriented generation with language models: FlexGen's block schedule with H2O's fixed-size KV cache."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexgen_h2o.engine.requests import GenerationOutput
    from flexgen_h2o.llm import LLM
    from flexgen_h2o.plan.sampling import SamplingParams

__all__ = ["LLM", "GenerationOutput", "SamplingParams"]

_HOMES = {"LLM": "llm", "GenerationOutput": "engine.requests", "SamplingParams": "plan.sampling"}


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first used, so that commands can answer --help without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
