#!/usr/bin/env bash
# Every (variant, seed) of a config. What is finished is skipped, what was stopped or killed goes on: just run it again.
#
#   runs/pairs.sh CONFIG.toml "VARIANTS" "SEEDS" [--key=value ...]
#   runs/pairs.sh configs/s.toml "block rd" "1 2 3 4 5"
#
# NPROC=8   each run under torchrun with so many processes a node; several nodes: set torchrun's own PET_NNODES,
#           PET_NODE_RANK, PET_MASTER_ADDR (or PET_RDZV_ENDPOINT ...) on each, and start this on each
# JOBS=2    so many runs side by side (default 1)
set -uo pipefail
if (( $# < 3 )); then sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
config=$1 variants=$2 seeds=$3
shift 3
for option in "$@"; do
    case $option in
        --out[-_]dir*) echo "error: $0: every run has a folder of its own; --out_dir would put them all in one" >&2; exit 2 ;;
        --seed*|--variant*) echo "error: $0: variants and seeds are its second and third argument, not $option" >&2; exit 2 ;;
    esac
done
set -f  # variants and seeds are words, not file names
count=^[1-9][0-9]*$
if [[ ! -f $config || -z ${variants//[[:space:]]} || -z ${seeds//[[:space:]]} || ! ${JOBS:-1} =~ $count || ! ${NPROC:-1} =~ $count ]]; then
    echo "error: $0: wants a config file, variants, seeds, and JOBS and NPROC (if set) above zero; not '$config' '$variants' '$seeds' JOBS=${JOBS:-} NPROC=${NPROC:-}" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")/.." && pwd)
launch=(python)
if [[ -n ${NPROC:-} ]]; then
    launch=(torchrun --nproc_per_node="$NPROC")
    [[ -n ${PET_NNODES:-} ]] || launch+=(--standalone)
fi

# glibc's malloc: keep freed pages mapped, below 32 MiB a tensor and 4 GiB in all. Saves 8-24 ms of page faults in a
# 600 ms step on a CPU. Both or neither: each alone switches off glibc's own adaptation and faults more than the defaults.
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-4294967296} MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}

pids=() failed=0
stop() { trap '' INT TERM; kill -TERM ${pids[@]+"${pids[@]}"} 2>/dev/null; wait; exit 130; }  # each run saves, then ends
trap stop INT TERM

until_below() {  # wait until fewer than $1 runs go on
    local pid going
    while :; do
        going=()
        for pid in ${pids[@]+"${pids[@]}"}; do
            if kill -0 "$pid" 2>/dev/null; then going+=("$pid"); else wait "$pid" || failed=$?; fi
        done
        pids=(${going[@]+"${going[@]}"})
        (( ${#pids[@]} < $1 )) && return
        sleep 0.5
    done
}

total=0 started=0
for seed in $seeds; do for variant in $variants; do (( ++total )); done; done
for seed in $seeds; do
    for variant in $variants; do
        until_below "${JOBS:-1}"
        (( failed )) && break 2
        echo "run $(( ++started )) of $total: $variant, seed $seed"
        "${launch[@]}" "$here/train.py" "$config" --variant="$variant" --seed="$seed" --wait "$@" &
        pids+=($!)
    done
done
until_below 1
(( failed )) && echo "error: a run ended with status $failed; mend its cause and run the same command again" >&2
exit "$failed"
