#!/usr/bin/env bash
# Train on NGPU ranks of this node; further arguments are overrides (--table.key value).
#
#   NGPU         ranks on this node (default: the visible GPUs; without a GPU, 2 CPU ranks)
#   CONFIG_FILE  configuration (default: train_configs/debug_model.toml)
#   LOG_RANK     ranks whose log is shown, separated by commas (default: 0)
#
# Several nodes: run this on each with NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT set (docs/several_nodes.md).
# This is `lct train` from a clone, installed or not.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

python="${PYTHON:-}"
if [ -z "$python" ]; then
  if [ -x "$root/.venv/bin/python" ]; then python="$root/.venv/bin/python"; else python=python3; fi
fi

# A folder `trainer` where the user stands is not this program.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1
exec "$python" -m trainer train "$@"
