"""The flags of `python -m flexgen_h2o.policy_search`: parsed, checked, every mistake reported at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.basics.folders import DEMO_MODEL
from flexgen_h2o.basics.settings import borrowed, field_values, flag_name, setting
from flexgen_h2o.commands.flags import Flags, Parser, parse_all, unwritable
from flexgen_h2o.commands.settings_flags import add_flags, filled_from
from flexgen_h2o.kvcache.eviction.spec import EvictionSpec
from flexgen_h2o.models.registry import from_folder, published
from flexgen_h2o.plan.model_shape import ModelShape
from flexgen_h2o.plan.names import DTYPES
from flexgen_h2o.plan.placement import Percent, Tier
from flexgen_h2o.plan.policy import Policy
from flexgen_h2o.plan.run_settings import MemoryBudgets, ModelChoice
from flexgen_h2o.plan.sampling import SamplingParams
from flexgen_h2o.search.cost_model import LANES
from flexgen_h2o.search.search import BATCH_SIZES, Choices

DESCRIPTION = """Finds the block size and the homes of weights, KV cache and hidden states that take the least time per
token within the memory of a machine, with and without eviction. Every time and speed is a projection."""
EPILOG = """With --percent, --gpu-batch-size and --num-gpu-batches the policy is given: what it would take is predicted.
exit codes: 0 done; 2 unusable arguments, or nothing fits; 130 interrupted."""

DEFAULT_PROMPT_LEN = 512
AUTO = "auto"
SWITCHES = {AUTO: (False, True), "on": (True,), "off": (False,)}
ENGINES = ("flexgen_h2o", "flexgen")


def _encoding(default: str, text: str, shown: str) -> Any:
    """A field that says whether the search may choose, and if not, what it is."""
    return setting(default, "choice", text, shown=shown, known=tuple(SWITCHES))


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """What is searched for, where, and what becomes of it."""

    model: str | None = borrowed(ModelChoice, "model")
    prompt_len: int | None = setting(
        None, "whole", "tokens of a prompt", shown=f"{DEFAULT_PROMPT_LEN}, or what the context allows", least=1
    )
    gen_len: int = borrowed(SamplingParams, "max_new_tokens")
    hh_ratio: Any = borrowed(EvictionSpec, "hh_ratio")
    recent_ratio: Any = borrowed(EvictionSpec, "recent_ratio")
    hardware: str = setting(AUTO, "text", "auto for this machine, a name such as t4, or FILE", shown=AUTO)
    dtype: str = setting(
        AUTO,
        "choice",
        "float32, bfloat16 or float16",
        shown="float16 on a GPU; else the fastest",
        known=(AUTO, *DTYPES),
    )
    gpu_mem: float | None = borrowed(
        MemoryBudgets, "gpu_mem", text="GB (2**30 bytes) on the gpu", shown="what the hardware has"
    )
    cpu_mem: float | None = borrowed(MemoryBudgets, "cpu_mem", text="in host memory, likewise", shown=None)
    disk_mem: float | None = borrowed(
        MemoryBudgets,
        "disk_mem",
        text="on disk, likewise; unless given, the disk is used only where it gains more than a tenth",
        shown=None,
    )
    compress_weight: str = _encoding("off", "4-bit weights: auto, on or off", "off, as they change what the model says")
    compress_cache: str = _encoding("off", "4-bit keys and values: auto, on or off", "off")
    cpu_cache_compute: str = _encoding(
        AUTO, "attention of KV in host memory on the CPU, beside a GPU: auto, on or off", AUTO
    )
    gpu_batch_size: int | None = borrowed(Policy, "gpu_batch_size", None, shown="the best")
    num_gpu_batches: int | None = borrowed(Policy, "num_gpu_batches", None, shown="the best")
    percent: Percent | None = borrowed(
        Policy, "percent", None, text="six numbers, as run takes them: predict this placement", shown=None
    )
    decode_batch_size: int | None = borrowed(
        Policy, "decode_batch_size", text="with --percent: rows computed together in decode", shown=None
    )
    engine_model: str = setting(
        ENGINES[0],
        "choice",
        "flexgen_h2o, or flexgen for the engine of FlexGen and H2O's authors",
        shown=ENGINES[0],
        known=ENGINES,
    )
    lane_share: tuple[str, ...] = setting(
        (),
        "texts",
        f"LANE=SHARE ...: a lane reaches that share of its rate; lanes: {', '.join(LANES)}",
        metavar="LANE=SHARE",
    )
    output: str | None = setting(None, "text", "FILE for the policy, as run --policy takes it", short="-o")
    plot: str | None = setting(
        None, "text", "FILE.png for throughput against rows and memory by tier (needs matplotlib)"
    )
    trace: str | None = setting(None, "text", "FILE for a simulated trace, for Perfetto or chrome://tracing")
    json: bool = setting(False, "given", "print one JSON object, the last line")


def build_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="python -m flexgen_h2o.policy_search", description=DESCRIPTION, epilog=EPILOG, allow_abbrev=False
    )
    add_flags(parser, [SearchFlags])
    return parser


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SearchFlags):
    """Checked flags.

    Attributes:
        given: the policy, where it is given; choices: what may be chosen, where it is not.
    """

    prompt_len: int
    config: ModelShape
    eviction: EvictionSpec
    choices: Choices
    given: Policy | None
    lane_shares: dict[str, float]

    @property
    def memory(self) -> dict[Tier, float | None]:
        """Budgets in GB."""
        return {"gpu": self.gpu_mem, "cpu": self.cpu_mem, "disk": self.disk_mem}


def read_flags(argv: list[str]) -> SearchOptions:
    """Parses and checks the command line. Raises UsageError with every mistake found in it."""
    args, flags = parse_all(build_parser(), argv)
    config = _config(args.model, flags)
    asked: SearchFlags = filled_from(flags, SearchFlags)
    eviction = EvictionSpec("h2o", asked.hh_ratio, asked.recent_ratio)
    flags.problems += eviction.problems()
    longest = config.max_position_embeddings - asked.gen_len if config is not None else DEFAULT_PROMPT_LEN
    prompt_len = asked.prompt_len or max(1, min(DEFAULT_PROMPT_LEN, longest))
    if config is not None and prompt_len + asked.gen_len > config.max_position_embeddings:
        flags.problems.append(
            f"--prompt-len {prompt_len} + --gen-len {asked.gen_len} exceed {config.name}'s context of"
            f" {config.max_position_embeddings} tokens; shorten one of them"
        )
    given = _given_policy(asked, flags)
    for flag, path in (("--output", asked.output), ("--plot", asked.plot), ("--trace", asked.trace)):
        problem = None if path is None else unwritable(flag, Path(path))
        flags.problems += [] if problem is None else [problem]
    lane_shares = _lane_shares(asked.lane_share, flags)
    if lane_shares and asked.engine_model == "flexgen":
        flags.problems.append("--lane-share means nothing with --engine-model flexgen; leave it out")
    if flags.problems or config is None:
        raise UsageError(flags.problems)
    return SearchOptions(
        **{**field_values(asked), "prompt_len": prompt_len, "hardware": asked.hardware or AUTO},
        config=config,
        eviction=eviction,
        choices=_choices(asked),
        given=given,
        lane_shares=lane_shares,
    )


def _config(model: str | None, flags: Flags) -> ModelShape | None:
    """The model's sizes; no weights are needed."""
    if model is None:
        return from_folder(DEMO_MODEL, name="demo")
    try:
        folder = Path(model).expanduser()
        return from_folder(folder) if folder.is_dir() else published(model)
    except UsageError as error:
        flags.problems += error.problems
    except (OSError, RuntimeError) as error:
        flags.problems.append(f"--model {model} cannot be looked for: {error}; give another name")
    return None


def _choices(asked: SearchFlags) -> Choices:
    """What may be chosen."""
    return Choices(
        gpu_batch_size=BATCH_SIZES if asked.gpu_batch_size is None else (asked.gpu_batch_size,),
        num_gpu_batches=asked.num_gpu_batches,
        compress_weight=SWITCHES[asked.compress_weight],
        compress_cache=SWITCHES[asked.compress_cache],
        cpu_cache_compute=SWITCHES[asked.cpu_cache_compute],
    )


def _given_policy(asked: SearchFlags, flags: Flags) -> Policy | None:
    """The policy, if all of it is given."""
    if not flags.given("--percent") and asked.decode_batch_size is not None:
        flags.problems.append("--decode-batch-size means nothing without --percent; leave it out")
    if asked.percent is None:
        return None
    if asked.gpu_batch_size is None or asked.num_gpu_batches is None:
        flags.problems.append(
            "--percent is predicted for a block of given size: add --gpu-batch-size and --num-gpu-batches"
        )
        return None
    switches = ("compress_weight", "compress_cache", "cpu_cache_compute")
    flags.problems += [
        f"{flag_name(name)} auto leaves a choice, and with --percent all of it is given; say on or off"
        for name in switches
        if flags.text(flag_name(name)) == AUTO
    ]
    given = Policy(
        asked.gpu_batch_size,
        asked.num_gpu_batches,
        asked.decode_batch_size,
        asked.percent,
        **{name: getattr(asked, name) == "on" for name in switches},
    )
    flags.problems += given.problems()
    return given


def _lane_shares(texts: Sequence[str], flags: Flags) -> dict[str, float]:
    found = {}
    for text in texts:
        lane, _, number = text.partition("=")
        share = flags.real_number("--lane-share", number, 0.01, 1) if lane in LANES else None
        if lane not in LANES:
            flags.problems.append(f"--lane-share {text}: {lane!r} is no lane; lanes are {', '.join(LANES)}")
        if share is not None:
            found[lane] = share
    return found
