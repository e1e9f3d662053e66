#!/usr/bin/env bash
# `make gpu`: on a machine with an NVIDIA GPU, everything that elsewhere is only emulated or compiled: the tests marked
# `gpu`, `verify` in every dtype, and the `full` preset. Leaves one folder with a log of each step, the run and its
# report. Exit code: 0 if every step passed, 1 if one did not, 4 if there is no GPU to run on.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${OUT:-gpu-check/$(date +%Y%m%d-%H%M%S)}

missing=$("$python" -c 'from spikemark.kernels import registry; print(registry.gpu_missing() or "")') || exit 1
if [ -n "$missing" ]; then
    echo "nothing was run: $missing" >&2
    exit 4
fi

mkdir -p "$folder"
failed=0
step() { # step NAME COMMAND...: its output goes to the terminal and to NAME.txt
    local name=$1 code
    shift
    echo "== $name: $*"
    "$@" 2>&1 | tee "$folder/$name.txt"
    code=${PIPESTATUS[0]}
    echo "$name: exit code $code" >>"$folder/summary.txt"
    [ "$code" -eq 0 ] || failed=1
}

cuda=$("$python" -c 'import torch; print(torch.version.cuda.split(".")[0])')
arch=$("$python" -c 'import torch; print("sm_%d%d" % torch.cuda.get_device_capability())')
step install "$python" -m pip install -q -c constraints.txt -e ".[test,cuda$cuda]"
step environment "$python" -m spikemark env
step implementations "$python" -m spikemark list implementations
step inspect "$python" -m spikemark inspect --arch "$arch"
step tests "$python" -m pytest tests/gpu -m gpu -rs --junitxml "$folder/tests.xml"
step verify "$python" -m spikemark verify --device cuda \
    --dtype float32 --dtype float16 --dtype bfloat16 --dtype float64
step run "$python" -m spikemark run --preset full --device cuda --out "$folder/run"

echo
cat "$folder/summary.txt"
echo "everything is in $folder; the report is $folder/run/report.html"
exit "$failed"
