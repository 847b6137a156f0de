#!/usr/bin/env bash
# One session on a GPU, under nine minutes: tests, the casts that they prove, speed, sanitizers.
#   benchmarks/gpu_session.sh [FOLDER]      records and logs go there ($OUT, else gpu-session)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-${OUT:-gpu-session}}
mkdir -p "$out"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/../triton-cache}
workers=()
"$python" -c 'import xdist' 2>/dev/null && workers=(-n 12 --dist worksteal)

echo "== tests"
timeout 240 "$python" -m pytest -q -m gpu tests/gpu/test_kernels_on_gpu.py \
  tests/gpu/test_fused_on_gpu.py tests/gpu/test_emulated_on_gpu.py tests/gpu/test_attention_on_gpu.py \
  tests/gpu/test_attention_calls_on_gpu.py tests/gpu/test_attention_fused_on_gpu.py "${workers[@]}" -p no:cacheprovider -p no:benchmark --tb=short \
  --junitxml="$out/tests.xml" >"$out/tests.log" 2>&1
grep -E "^(FAILED|ERROR)|passed|failed" "$out/tests.log" | cut -c1-300 | tail -40

echo "== casts that passed everything, for proven.py"
"$python" benchmarks/proven_casts.py "$out/tests.xml" | tee "$out/proven.txt" | tail -5

echo "== speed"
timeout 170 "$python" benchmarks/casts.py --quick --peers --widths --out "$out/casts.jsonl" \
  2>"$out/casts.log" | cut -c1-120
tail -3 "$out/casts.log"

echo "== sanitizers"
small='test_small_shapes_for_the_sanitizer'
for tool in memcheck racecheck; do
  timeout 55 compute-sanitizer --tool "$tool" --error-exitcode 9 "$python" -m pytest -q -m gpu \
    -p no:cacheprovider -p no:benchmark tests/gpu/test_fused_on_gpu.py -k "$small" >"$out/$tool.log" 2>&1
  echo "$tool: exit $?; $(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$out/$tool.log" | tail -1)"
done
