"""Where this package keeps things, unless told otherwise."""

OFFLOAD = "~/flexgen_h2o_offload"  # files of a run, gone when it ends
CACHE = "~/.cache/flexgen_h2o"  # weights, and rates of this machine, for later runs
