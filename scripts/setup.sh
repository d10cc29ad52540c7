#!/usr/bin/env bash
# Makes .venv at the project root with the versions of constraints.txt; does nothing when it is up to date.
# PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$root/.venv
stamp=$venv/setup-complete

fail() {
    echo "error: $*" >&2
    exit 1
}

python=${PYTHON:-python3}
command -v "$python" >/dev/null ||
    fail "$python was not found: install Python 3.11 or newer, or set PYTHON to its path."

# Line 1: the interpreter outside any active environment. Line 2: what the environment is made from;
# the path is part of it, because an environment does not survive a move of the project.
# (Old syntax on purpose: an old Python must get as far as its message.)
info=$("$python" -c '
import sys
if sys.version_info < (3, 11):
    sys.exit(3)
import hashlib
made_from = [sys.version, sys.base_prefix, sys.argv[1]]
digest = hashlib.sha256("\n".join(made_from).encode())
import glob
for name in ["setup.py", "constraints.txt"] + sorted(glob.glob("flexgen_h2o/kernels/native/*")):
    with open(name, "rb") as file:
        digest.update(hashlib.sha256(file.read()).digest())
print(sys._base_executable)
print(digest.hexdigest())
' "$root") || {
    [ $? -eq 3 ] || fail "$python could not be run."
    fail "the pinned versions need Python 3.11 or newer, but $python is $("$python" -c 'import platform; print(platform.python_version())'); set PYTHON to a newer one."
}
base=${info%%$'\n'*}
want=${info##*$'\n'}

complete() {
    [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]
}

if complete; then exit 0; fi

"$base" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "this Python lacks the venv module: install it (on Debian and Ubuntu: apt install python3-venv) and try again."

# One run at a time. The lock belongs to the open file, so it goes when this script and its children end.
exec 9>"$root/.venv.lock"
"$base" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
if complete; then exit 0; fi # another run made it meanwhile

echo "setting up .venv (about a minute)" >&2
rm -rf "$venv"
"$base" -m venv "$venv"
"$venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[test]"

# Last, and by a rename: a run that was interrupted leaves no stamp.
echo "$want" >"$stamp.part"
mv "$stamp.part" "$stamp"
