#!/usr/bin/env bash
# Runs a command with the memory and the disk of a smaller machine:
#   scripts/limit.sh MEMORY [--disk-read BYTES_PER_SECOND] -- command [argument ...]
# MEMORY is a number of bytes, or one with K, M or G (powers of 1024); it counts the page cache too. The disk is the one
# that holds the current folder. Uses control groups, version 1 or 2, which usually takes root. Ends as the command ends.
set -euo pipefail

fail() {
    echo "error: $*" >&2
    exit 2
}

bytes() { # a number with K, M or G -> bytes
    local number=${1%[KMG]} factor=1
    case $1 in *K) factor=1024 ;; *M) factor=$((1024 ** 2)) ;; *G) factor=$((1024 ** 3)) ;; esac
    [[ $number =~ ^[0-9]{1,12}$ ]] && [ "$number" -gt 0 ] ||
        fail "'$1' is no amount: give a whole number of bytes above 0, or one with K, M or G, such as 1500M"
    echo $((number * factor))
}

memory='' read_rate=''
while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        --disk-read) [ $# -gt 1 ] || fail "--disk-read needs bytes per second"; read_rate=$(bytes "$2"); shift 2 ;;
        -*) fail "$1 is no option: use MEMORY [--disk-read BYTES_PER_SECOND] -- command" ;;
        *) [ -z "$memory" ] || fail "'$1' is one amount of memory too many; put -- before the command"
           memory=$(bytes "$1"); shift ;;
    esac
done
[ -n "$memory" ] && [ $# -gt 0 ] || fail "use: scripts/limit.sh MEMORY [--disk-read BYTES_PER_SECOND] -- command"

# The whole disk under the current folder, as major:minor; limits do not apply to partitions.
disk=$(stat -c '%Hd:%Ld' . 2>/dev/null || true)
if [ -e "/sys/dev/block/$disk/partition" ]; then disk=$(cat "/sys/dev/block/$disk/../dev"); fi
if [ -n "$read_rate" ] && [ ! -e "/sys/dev/block/$disk" ]; then
    fail "the current folder lies on no disk whose speed can be limited (device ${disk:-unknown}); change to another folder"
fi

groups=()
cleanup() {
    for group in "${groups[@]}"; do
        # Processes that outlived the command end here, or the group could not be removed.
        while read -r pid; do kill -KILL "$pid" 2>/dev/null || true; done <"$group/cgroup.procs"
        for _ in $(seq 50); do rmdir "$group" 2>/dev/null && break; sleep 0.1; done
    done
}
trap cleanup EXIT

make_group() { # folder of a controller -> a new group below this process' own, or below the root
    local own
    own=$1$(sed -n "s/^[0-9]*:$2:\(.*\)/\1/p" /proc/self/cgroup | head -n 1)
    for parent in "$own" "$1"; do
        group=$parent/limit-$$
        if mkdir "$group" 2>/dev/null; then groups+=("$group"); return 0; fi
    done
    return 1
}

put() { # file, value
    echo "$2" >"$1" 2>/dev/null || fail "$1 cannot be set to '$2': this kernel or container does not allow the limit"
}

root=/sys/fs/cgroup
if [ -f "$root/cgroup.controllers" ]; then
    # Version 2. A group that holds processes cannot limit its children, so the new one lies below the root.
    echo "+memory +io" >"$root/cgroup.subtree_control" 2>/dev/null || true
    group=$root/limit-$$
    mkdir "$group" 2>/dev/null || fail "$root is not writable: run this as root, on a machine whose control groups may be changed"
    groups+=("$group")
    put "$group/memory.max" "$memory"
    [ ! -f "$group/memory.swap.max" ] || put "$group/memory.swap.max" 0
    [ -z "$read_rate" ] || put "$group/io.max" "$disk rbps=$read_rate"
    peak_file=$group/memory.peak
    kills() { sed -n 's/^oom_kill //p' "$group/memory.events"; }
elif [ -d "$root/memory" ]; then
    make_group "$root/memory" '[^:]*memory[^:]*' ||
        fail "$root/memory is not writable: run this as root, on a machine whose control groups may be changed"
    memory_group=$group
    put "$group/memory.limit_in_bytes" "$memory"
    peak_file=$group/memory.max_usage_in_bytes
    kills() { sed -n 's/^oom_kill //p' "$memory_group/memory.oom_control"; }
    if [ -n "$read_rate" ]; then
        make_group "$root/blkio" '[^:]*blkio[^:]*' || fail "$root/blkio is not writable, so the disk cannot be limited"
        put "$group/blkio.throttle.read_bps_device" "$disk $read_rate"
    fi
else
    fail "there are no control groups at $root: memory and disk cannot be limited on this machine"
fi

code=0
bash -c 'for group in $1; do echo $$ >"$group/cgroup.procs"; done; shift; exec "$@"' - "${groups[*]}" "$@" || code=$?
peak=$(cat "$peak_file" 2>/dev/null || echo 0)
echo "limit.sh: at most $((peak / 1024 / 1024)) of $((memory / 1024 / 1024)) MB used, page cache included" >&2
killed=$(kills 2>/dev/null || echo 0)
if [ "${killed:-0}" -gt 0 ]; then
    echo "limit.sh: the kernel killed $killed process(es) that needed more memory than that" >&2
fi
exit "$code"
