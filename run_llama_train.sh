#!/usr/bin/env bash
# Train on NGPU ranks of this node; further arguments are overrides (--table.key value).
#
#   NGPU         ranks on this node (default: the visible GPUs; without a GPU, 2 CPU ranks)
#   CONFIG_FILE  configuration (default: train_configs/debug_model.toml)
#   LOG_RANK     ranks whose log is shown, separated by commas (default: 0)
#
# Several nodes: run this on each with NNODES, MASTER_ADDR and MASTER_PORT set (see multinode_trainer.slurm).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

python="${PYTHON:-}"
if [ -z "$python" ]; then
  if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; else python=python3; fi
fi

visible_gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true
  else
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
  fi
}

gpus="$(visible_gpus)"
NGPU="${NGPU:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)}"
case "$NGPU" in
  '' | *[!0-9]* | 0) echo "error: NGPU = '$NGPU' must be a whole number from 1 up, such as NGPU=2" >&2; exit 2 ;;
esac
CONFIG_FILE="${CONFIG_FILE:-$root/train_configs/debug_model.toml}"
NNODES="${NNODES:-1}"
export NNODES LOG_RANK="${LOG_RANK:-0}"

# Ranks share the cores instead of fighting over them.
threads=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) / NGPU))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
# Long sequences of changing sizes fragment the caching allocator.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# Every check that needs no process: a wrong setting is told in one sentence, before anything starts.
"$python" "$root/train.py" --check-config --world-size "$((NGPU * NNODES))" --job.config_file "$CONFIG_FILE" "$@"

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m trainer.runtime.launch --nproc-per-node "$NGPU" --job.config_file "$CONFIG_FILE" "$@"
