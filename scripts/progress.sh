# shellcheck shell=bash
# Sourced by the other scripts. Says what they do and how far they are.

# A line with the seconds since the script began.
say() {
  echo "[$SECONDS s] $*"
}

# Runs a build, whose output goes to the file that comes first. Shows of it what setup.py says and which sources have
# been compiled, and if it fails, the errors.
build() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  NINJA_STATUS='[%f of %t, %e s] ' "$@" 2>&1 | tee "$log" |
    sed -nuE '/^inplace_abn: /p; s|^(\[[0-9]+ of [^]]*\]) .* [^ ]*/(src/[^ ]+) -o .*|\1 \2|p' ||
    { grep -E -A 4 'error|Error' "$log" || tail -n 40 "$log"; return 1; }
}
