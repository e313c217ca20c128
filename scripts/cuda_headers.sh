# shellcheck shell=bash disable=SC2154
# Sourced by the other scripts: a toolkit of the compiler alone lacks the headers of the libraries that torch's headers
# name; torch's own wheels bring them. $python is the interpreter that has torch.
for include in "$("$python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")"/nvidia/cu*/include; do
  if [ -d "$include" ]; then
    export CPATH="${CPATH:+$CPATH:}$include"
  fi
done
