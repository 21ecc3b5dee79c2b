#!/bin/bash
# What a GPU must show next of the codecs, in nine minutes: exchanges eager and replayed, kernels against torch, races.
#   bash scripts/gpu/next.sh FOLDER
# Each part has a limit and is on disk before the next one begins. A part that fails does not stop the others.
out=${1:?the folder for what is found}
mkdir -p "$out"
part() {
  echo "== $2, at most $1 s" >&2
  timeout "$1" "${@:3}" >"$out/$2.log" 2>&1 || echo "$2 ended with $?, see $out/$2.log" >&2
}
triton="topk threshold dgc adacomp"
fused="powersgd efsignsgd qsgd fp8 int8 onebit terngrad distefblocksgd onebitadam"
part 90 bits python -m pytest -n0 -q tests/device/triton -m "gpu or not gpu" -k "not compile"
part 60 counts python -m scripts.gpu.report --only counts --compressors $triton --out "$out/counts"
part 150 sparse python -m scripts.gpu.replay --only ceilings exchange --compressors topk:chunk=64 $triton --rounds 3 --out "$out/sparse"
part 120 fused python -m scripts.gpu.replay --only exchange --compressors $fused --rounds 3 --out "$out/fused"
part 90 codecs python -m scripts.gpu.report --only codecs --compressors $triton powersgd --rounds 3 --out "$out/codecs"
if command -v compute-sanitizer >/dev/null; then
  part 30 memcheck compute-sanitizer --tool memcheck python -m scripts.gpu.sections topk,topk:chunk=64,threshold,adacomp 0
  part 30 racecheck compute-sanitizer --tool racecheck python -m scripts.gpu.sections topk,topk:chunk=64,threshold,adacomp 0
fi
ls "$out"
