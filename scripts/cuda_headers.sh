# shellcheck shell=bash disable=SC2154
# Sourced by the other scripts. Torch's headers include headers of CUDA libraries, which a toolkit with the compiler
# alone lacks. The wheels that torch depends on have them. $python is the interpreter that has torch.
headers=$("$python" -c "
import glob, importlib.util
spec = importlib.util.find_spec('nvidia')
folders = spec.submodule_search_locations if spec else []
print(':'.join(found for folder in folders for found in sorted(glob.glob(f'{folder}/cu*/include'))))")
if [ -n "$headers" ]; then
  export CPATH="${CPATH:+$CPATH:}$headers"
fi
