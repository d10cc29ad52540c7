"""The drivers' command with one engine more: `fake`."""

from __future__ import annotations

import sys

from flexgen_h2o.bench.drivers import __main__ as command
from flexgen_h2o.bench.drivers.common import ENGINES, Engine

ENGINES["fake"] = Engine("fake_driver", ("numpy", "no-such-package"))

if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:]))
