"""Means, errors and paired differences, against a bootstrap and hand counts."""

from __future__ import annotations

import math
import statistics as python_statistics

import pytest
import torch

from flexgen_h2o.evaluation.statistics import difference, estimate, perplexity, perplexity_change


def test_an_estimate_is_a_mean_and_its_standard_error() -> None:
    values = [1.0, 2.0, 4.0, 9.0]
    found = estimate(torch.tensor(values))
    assert found.mean == 4.0
    assert found.stderr == pytest.approx(python_statistics.stdev(values) / 2)
    assert estimate(torch.tensor([3.0])).stderr == 0.0


def made_up_nll() -> tuple[torch.Tensor, torch.Tensor]:
    """Two policies on 40 documents of 6 tokens, that differ much less than documents do."""
    generator = torch.Generator().manual_seed(5)
    base = 4 + torch.randn(40, 1, generator=generator) * 0.4 + torch.randn(40, 6, generator=generator)
    return base, base + 0.05 + 0.1 * torch.randn(40, 6, generator=generator)


def bootstrap(values: list[torch.Tensor], statistic: object) -> float:
    """The spread of a statistic over documents drawn anew."""
    generator = torch.Generator().manual_seed(6)
    drawn = []
    for _ in range(2000):
        chosen = torch.randint(len(values[0]), (len(values[0]),), generator=generator)
        drawn.append(float(statistic(*(value[chosen] for value in values))))
    return python_statistics.stdev(drawn)


def test_perplexity_and_its_error_are_those_of_a_bootstrap() -> None:
    nll, _ = made_up_nll()
    found = perplexity(nll)
    assert found.mean == pytest.approx(math.exp(float(nll.mean())), rel=1e-6)
    assert found.stderr == pytest.approx(bootstrap([nll], lambda x: x.mean().exp()), rel=0.1)


def test_a_change_of_perplexity_is_paired() -> None:
    nll, other = made_up_nll()
    found = perplexity_change(other, nll)
    ratio = math.exp(float(other.mean())) / math.exp(float(nll.mean()))
    assert found.mean == pytest.approx(ratio - 1, rel=1e-4)
    assert found.stderr == pytest.approx(bootstrap([other, nll], lambda x, y: (x.mean() - y.mean()).exp()), rel=0.1)
    assert found.stderr < perplexity(nll).stderr / perplexity(nll).mean / 3  # far less than each alone


def test_a_difference_is_paired() -> None:
    found = difference(torch.tensor([1.0, 0.5, 0.0]), torch.tensor([0.5, 0.0, -0.5]))
    assert (found.mean, found.stderr) == (0.5, 0.0)
