"""CTranslate2: its own converted model, in memory, in int8 or float32."""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexgen_h2o.bench.drivers.common import EngineRefused, Generation, Loaded, Settings, absent, refuse_gpu

COMPUTE_TYPES = ("int8", "float32")


def load(settings: Settings) -> Loaded:
    """Converts the checkpoint at first, beside it, and loads the result."""
    try:
        import ctranslate2
    except ImportError:
        raise absent("ctranslate2") from None
    settings.chosen()
    refuse_gpu(settings, "its package is not made for them everywhere")
    if settings.dtype not in COMPUTE_TYPES:
        raise EngineRefused(f"ctranslate2 computes OPT in int8 or float32 on a CPU, not in {settings.dtype}")
    folder = settings.checkpoint.with_name(f"{settings.checkpoint.name}-ctranslate2-{settings.dtype}")
    if not folder.is_dir():
        _convert(settings.checkpoint, settings.dtype, folder)
    generator = ctranslate2.Generator(
        str(folder),
        device="cpu",
        compute_type=settings.dtype,
        inter_threads=1,
        intra_threads=settings.threads,
    )
    words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))

    def generate(prompts: NDArray[np.int64], gen_len: int) -> Generation:
        return _generate(generator, words, prompts, gen_len)

    return Loaded(generate, {"compute_type": generator.compute_type})


def _generate(generator: Any, words: Sequence[str], prompts: NDArray[np.int64], gen_len: int) -> Generation:
    """One batch. The prompt is read at once, as its documentation advises for long ones."""
    first: dict[int, float] = {}

    def note(step: Any) -> bool:
        first.setdefault(step.batch_id, time.perf_counter())
        return False

    started = time.perf_counter()
    tokens = [[words[token] for token in row] for row in prompts]
    results = generator.generate_batch(
        tokens,
        max_length=gen_len,
        include_prompt_in_result=False,
        end_token=[],  # none, so that nothing ends a row and nothing is masked
        return_end_token=True,
        callback=note,
    )
    ended = time.perf_counter()
    first_token = max(first.values())
    return Generation([result.sequences_ids[0] for result in results], first_token - started, ended - first_token)


def _convert(checkpoint: Path, dtype: str, folder: Path) -> None:
    """Runs CTranslate2's converter, under a temporary name until it is complete."""
    from ctranslate2.converters import TransformersConverter

    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    print(f"converting {checkpoint.name} to {dtype} for ctranslate2", file=sys.stderr)
    try:
        converter = TransformersConverter(str(checkpoint), low_cpu_mem_usage=True)
        converter.convert(str(part), quantization=dtype, force=True)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
