"""A machine's rates for people."""

from flexgen_h2o.basics.memory_sizes import GB
from flexgen_h2o.search.hardware import Hardware

SHOWN = {  # unit of a rate: what it is divided by, and the unit it is shown in
    "FLOP/s": (1e9, "GFLOP/s"),
    "byte/s": (GB, "GB/s"),
    "s/byte": (1 / GB, "s per GB"),
    "value/s": (1e9, "G/s"),
    "s/layer": (1e-3, "ms"),
}


def summary(hardware: Hardware) -> str:
    """The rates, one a line, with their spread; GB are 2**30 bytes."""
    memory = ", ".join(f"{tier} {nbytes / GB:.1f} GB" for tier, nbytes in hardware.memory.items())
    lines = [f"{hardware.name}: {hardware.device}, {hardware.cores} cores; usable: {memory}"]
    for name, rate in hardware.rates.items():
        divisor, unit = SHOWN[rate.unit]
        line = f"  {name:34} {rate.value / divisor:9.3f} {unit:8}"
        if name.startswith("gemm/"):
            _, dtype, rows = name.split("/")
            line += f"  {hardware.weight_bytes_s(dtype, int(rows)) / GB:8.3f} GB/s of weights"
        if rate.spread is not None:
            line += f"  spread {rate.spread:.1%}{', noisy' if rate.noisy else ''}"
        else:
            line += f"  {rate.source}"
        lines.append(line)
    for reason in dict.fromkeys(hardware.missing.values()):
        names = [name for name, why in hardware.missing.items() if why == reason]
        lines.append(f"  not measured: {', '.join(names)}: {reason}")
    if hardware.compute_threads is not None:
        lines.append(f"  beside a stream, {hardware.compute_threads} threads compute best")
    return "\n".join(lines)
