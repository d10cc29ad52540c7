"""How fast a phase could be: its counted work over rates that were measured alone.

The limit is the largest, over devices and links, of bytes or FLOPs over the rate. On one device products and attention
add, and so does the processor time that a disk costs.
"""

from flexgen_h2o.basics.errors import UsageError
from flexgen_h2o.plan.work import PhaseWork
from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.rates import FOUR_BITS


def resource_seconds(work: PhaseWork, hardware: Hardware, dtype: str, head_dim: int) -> dict[str, float]:
    """What each resource would take for the work at the rate measured alone.

    Raises UsageError if the hardware file lacks a rate.
    """
    seconds = {"compute": 0.0}
    for precision, flops, nbytes in (
        (dtype, work.gemm_flops, work.kv_bytes),
        (FOUR_BITS, work.gemm4_flops, work.kv4_bytes),
    ):
        seconds["compute"] += sum(count / hardware.gemm_flops(precision, rows) for rows, count in flops.items())
        if nbytes:
            seconds["compute"] += nbytes / hardware.attention_bytes_s(precision, head_dim)
    disk = {
        "disk_read": (hardware.disk_read_bytes_s, hardware.disk_read_cpu_s_per_byte),
        "disk_write": (hardware.disk_write_bytes_s, hardware.disk_write_cpu_s_per_byte),
    }
    for link, (rate, processor) in disk.items():
        if work.moved[link]:
            seconds[link] = work.moved[link] / rate()
            if hardware.device == "cpu":
                seconds["compute"] += work.moved[link] * processor() / hardware.cores
    for link in ("h2d", "d2h"):
        if work.moved[link] and hardware.device != "cpu":
            seconds[link] = work.moved[link] / hardware.link_bytes_s(link, pinned=True)
    return seconds


def limit_of(
    work: PhaseWork, hardware: Hardware | None, dtype: str, head_dim: int, device: str
) -> tuple[float | None, str | None, str | None]:
    """Limit of a phase in seconds and the resource that sets it; or neither, and why.

    Args:
        device: where compute happens: cpu or cuda.
    """
    if not work.gemm_flops and not work.gemm4_flops:
        return None, None, "nothing was computed"
    if hardware is not None and hardware.device != device:
        return None, None, f"{hardware.origin} describes a machine that computes on {hardware.device}"
    if hardware is None:
        return None, None, "no hardware file: python -m flexgen_h2o.profile_hardware makes one"
    try:
        seconds = resource_seconds(work, hardware, dtype, head_dim)
    except UsageError as error:
        return None, None, str(error)
    binding = max(seconds, key=lambda resource: seconds[resource])
    return seconds[binding], binding, None
