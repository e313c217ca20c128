# shellcheck shell=bash
# Sourced by the other scripts. Says what they do and how far they are.

# A line with the seconds since the script began.
say() {
  echo "[$SECONDS s] $*"
}

# Runs a command that may print nothing for long. Says what it does before, and every 20 s as far as the first comma.
waiting() {
  local text=$1 ticking status=0
  shift
  say "$text"
  # It ends with the script, even if the script is interrupted, and the sleep does not hold the script's output open.
  while sleep 20 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do say "still ${text%%,*}"; done &
  ticking=$!
  "$@" || status=$?
  kill "$ticking"
  wait "$ticking" 2>/dev/null || true
  return "$status"
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
