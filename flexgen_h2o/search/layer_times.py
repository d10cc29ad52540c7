"""Seconds of what a layer does beside its products with weights, and of the choice of tokens.

Where a machine was profiled (profiling/layers.py) they follow from what this engine took there. Else they are counted:
in bytes of memory that pass between products, and for prefill in attention's FLOPs.
"""

from flexgen_h2o.search.hardware import Hardware
from flexgen_h2o.search.sizes import Job

# Between products, a layer reads or writes so many vectors as long as the hidden state for each token: norms 4, scaled
# queries 2, heads put side by side 6 and back 2, activation 8, residual sums 6. Prefill's softmax reads and writes so
# many bytes for each weight: to float32, softmax, back, sums by column.
VECTORS = 28
SOFTMAX_BYTES = 24


def prefill_layer_s(job: Job, hardware: Hardware, rows: float) -> float:
    """A layer of prefill for a sub-batch, attention and the filling of its KV included.

    Attention of n columns to all before them is half of 2 * 2 n^2 hidden_size FLOPs for each sequence.
    """
    width, nbytes = job.prompt_len, job.hidden_bytes(rows, job.prompt_len)
    seconds_per_byte = hardware.prefill_s_per_byte(width)
    if seconds_per_byte is not None:
        return nbytes * seconds_per_byte
    products = 2 * rows * width**2 * job.config.hidden_size / hardware.gemm_flops(job.dtype, rows * width)
    weights = rows * job.config.num_attention_heads * width**2 / 2
    return products + (VECTORS * nbytes + weights * SOFTMAX_BYTES) / hardware.read_bytes_s()


def decode_layer_s(job: Job, hardware: Hardware, rows: float) -> float:
    """A layer of a decode step for so many rows, attention and what is fixed apart."""
    nbytes = job.hidden_bytes(rows, 1)
    rate = hardware.layer_bytes_s()
    return nbytes / rate if rate is not None else VECTORS * nbytes / hardware.read_bytes_s()


def choice_s(job: Job, hardware: Hardware, rows: float) -> float:
    """The choice of so many rows' next tokens from their logits; left out where nobody has measured it."""
    rate = hardware.choice_values_s()
    return 0.0 if rate is None else rows * job.config.vocab_size / rate
