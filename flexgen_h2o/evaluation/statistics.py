"""Means over documents with their standard errors, alone and against another policy on the same documents."""

from dataclasses import dataclass
from math import exp, sqrt

from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean over documents, and its standard error over the choice of documents (0 for a single one)."""

    mean: float
    stderr: float


def estimate(by_document: Tensor) -> Estimate:
    """The mean of [documents]."""
    values = by_document.double()
    stderr = float(values.std()) / sqrt(len(values)) if len(values) > 1 else 0.0
    return Estimate(float(values.mean()), stderr)


def perplexity(nll: Tensor) -> Estimate:
    """exp of the mean of [documents, tokens]; its error by the delta method."""
    log = estimate(nll.double().mean(dim=1))
    return Estimate(exp(log.mean), exp(log.mean) * log.stderr)


def perplexity_change(nll: Tensor, other: Tensor) -> Estimate:
    """By which share perplexity is above that of the other, paired by document: 0.06 is 6 % more.

    Args:
        nll, other: [documents, tokens] of the same documents.
    """
    log = estimate((nll.double() - other.double()).mean(dim=1))
    return Estimate(exp(log.mean) - 1, exp(log.mean) * log.stderr)


def difference(by_document: Tensor, other: Tensor) -> Estimate:
    """The mean difference of [documents] from the other's, paired."""
    return estimate(by_document.double() - other.double())
