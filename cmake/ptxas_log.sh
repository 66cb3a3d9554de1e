#!/bin/sh
# ptxas_log.sh DIRECTORY COMPILER ARGUMENT...: runs nvcc, and keeps what ptxas says of each kernel (registers, stack,
# spills, warnings) in DIRECTORY/SOURCE.txt, for the test that holds kernels to their budget.
directory=$1
shift
previous= object=
for argument; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
source=${object##*.dir/}
log=$directory/${source%.o}.txt
mkdir -p "$(dirname "$log")"
"$@" 2>"$log"
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' "$log" >&2
exit $status
