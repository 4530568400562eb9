#!/usr/bin/env bash
# Run a command that saves and ends at a signal, such as lct train, and say by the exit code whether its work is done:
#
#     deploy/resumable.sh lct train llama3_8b --checkpoint.enable
#
# lct train ends with 0 after a signal, because it has saved. A scheduler would take the job for done. This script passes
# signals on, and after one it ends with 128 + its number in place of 0. So the scheduler starts the same command again.
set -u

signal=0
"$@" &
child=$!

# A background process of a script ignores SIGINT, so it gets SIGTERM.
trap 'signal=15; kill -TERM "$child" 2>/dev/null' TERM INT
trap 'signal=1; kill -HUP "$child" 2>/dev/null' HUP
trap 'signal=10; kill -USR1 "$child" 2>/dev/null' USR1
trap 'signal=12; kill -USR2 "$child" 2>/dev/null' USR2

# A signal ends `wait`, too.
while kill -0 "$child" 2>/dev/null; do
    wait "$child"
done
wait "$child"
code=$?
if [ "$code" -eq 0 ] && [ "$signal" -ne 0 ]; then
    code=$((128 + signal))
fi
exit "$code"
