#!/usr/bin/env bash
# Every measurement of the embedded model cifar10 that docs show, made anew in $OUT (by default out/cifar10): six to fourteen
# core-hours, by the CPU. A stopped run goes on, and several of them, one per core, share the work: each part is taken by
# one. A part that fails ends the run; its words are in $OUT/PART.log.
#
#     scripts/measure_cifar10.sh & scripts/measure_cifar10.sh; wait
#
# It needs the extras fid and lite0. DATA: CIFAR-10 (optcov data cifar10 data/cifar10). REFERENCE: of FID and KID, made if it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/cifar10} DATA=${DATA:-data/cifar10} REFERENCE=${REFERENCE:-$OUT/reference.npz}
PATH="$PWD/.venv/bin:$PATH"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$OUT/done"

# part NAME COMMAND...: run a command once; another run that does it now is left to it
part() {
    local name=$1
    shift
    (
        flock --nonblock 9 || exit 0
        [ -s "$OUT/done/$name" ] && exit 0
        echo "$name: $*"
        "$@" >"$OUT/$name.log" 2>&1
        date -u +%F >"$OUT/done/$name"
    ) 9>>"$OUT/done/$name"
}

# the tables of docs/results.md: several runs share their cells
table() {
    optcov table "$@" --bundle cifar10 --data "$DATA" --schedules linear --out "$OUT/tables"
}
images() { # TABLE STEPS ROWS...
    local name=$1 steps=$2
    shift 2
    table "$name" --features inception --reference "$REFERENCE" --samples 2000 --steps "$steps" "${@/#/--method=}"
}
PAPER=("DDPM, beta-tilde" "DDPM, beta" A-DDPM NPR-DDPM SN-DDPM DDIM A-DDIM NPR-DDIM SN-DDIM)
BEYOND=(CNPR-DDPM CNPR-DDIM CSN-DDPM Spectral-DDPM OCM-DDPM "Bridge 2M")
PEERS=(UniPC "UniPC, Karras times" DPM-Solver++ SDE-DPM-Solver++)
causes() { # NAME BENCHMARK ARGUMENTS...
    local name=$1
    shift
    part "$name" python "$@" --record "$OUT/$name.jsonl"
}

part bits table bpd --images 128 --train-images 64 --steps 10,25,50,100,200,1000
until [ -e "$REFERENCE" ]; do python scripts/kernel_reference.py "$DATA" "$REFERENCE"; sleep 2; done
images fid 10 "${PAPER[@]}" "${BEYOND[@]}"
images peers 10 "${PEERS[@]}"
images fid 25 "${PAPER[@]}" "${BEYOND[@]}"
images peers 25 "${PEERS[@]}"
causes covariances benchmarks/covariances.py cifar10 "$DATA" --images 256 --steps 10,25
causes covariances-apart benchmarks/covariances.py cifar10 "$DATA" --images 256 --first 256 --steps 10,25
causes sn-forms benchmarks/sn_forms.py cifar10 --data "$DATA"
causes ocm-trace benchmarks/ocm_trace.py cifar10 "$DATA"
causes correlated-parts benchmarks/correlated_parts.py --bundle cifar10 --data "$DATA" --images 128
images fid 5 "Bridge 2M"
images peers 5 UniPC DPM-Solver++
causes few-steps-fid benchmarks/few_steps.py --bundle cifar10 --data "$DATA" --features inception --reference "$REFERENCE" \
    --samples 2000 --out "$OUT/few-steps" --steps 10 25 --row "Bridge 2M, last step at 0.15" \
    --against "Bridge 2M, last step at 0.15"
causes image-parts benchmarks/image_parts.py --data "$DATA" --reference "$REFERENCE" --out "$OUT/image-parts" --steps 5 10
images fid 50 "${PAPER[@]}" "${BEYOND[@]}"
images peers 50 UniPC DPM-Solver++ SDE-DPM-Solver++
part restoration python benchmarks/restoration.py "$OUT/restoration.jsonl" --bundle cifar10 --data "$DATA"
causes restoration-jacobian benchmarks/restoration_jacobian.py "$DATA"
echo "next: python scripts/keep_measurements.py $OUT"
