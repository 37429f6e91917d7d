#!/usr/bin/env bash
# The path of a newcomer in an environment of its own, with the seconds of each step: install, first report, list of
# models, page, and the examples of the README as plain Python. Run it as `docs/newcomer.sh`; pip needs the network.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
fresh=$(mktemp -d)
# where compiled files are forbidden, each start would compile the library again
export PYTHONDONTWRITEBYTECODE=
unset PYTHONPATH
trap 'rm -rf "$fresh"' EXIT
TIMEFORMAT='%1R s'
step() { printf '%-60s ' "$1"; shift; time "$@" >"$fresh/log" 2>&1 || { cat "$fresh/log"; exit 1; }; }

cd "$fresh"  # not in the checkout: what is installed is what is asked
step "python3 -m venv" python3 -m venv env
step "pip install costgraph[all]" env/bin/pip install -q "$root[all]"
step "costgraph report llama-3-8b, the first start of all" \
  env/bin/costgraph report llama-3-8b --hardware h100-sxm B=1 S=8192
step "costgraph report llama-3-8b, again" env/bin/costgraph report llama-3-8b --hardware h100-sxm B=1 S=8192
step "costgraph models" env/bin/costgraph models
step "costgraph explore llama-3-8b" env/bin/costgraph explore llama-3-8b --out page.html
step "costgraph explore deepseek-v3" env/bin/costgraph explore deepseek-v3 --out page.html
# a notebook's cells: the examples up to the one that needs torch
sed '/^## Trace a torch module/,$d' "$root/README.md" >cells.md
step "the examples of the README up to tracing" env/bin/python -m doctest cells.md
