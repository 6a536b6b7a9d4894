#!/usr/bin/env bash
# Sets everything up in .venv: system libraries, torch, the project. Safe to run again.
#   bash deploy/setup.sh [cpu|cuda12|cuda13] [--dev]
set -euo pipefail
cd "$(dirname "$0")/.."

variant=cpu
extras=""
for argument in "$@"; do
    case "$argument" in
    cpu | cuda12 | cuda13) variant=$argument ;;
    --dev) extras=",dev" ;;
    *)
        echo "setup: unknown argument '$argument'; usage: bash deploy/setup.sh [cpu|cuda12|cuda13] [--dev]" >&2
        exit 2
        ;;
    esac
done
torch_version=2.13.0

# Done before, here, from the same files? Then there is nothing to do. What was set up for development runs too.
fingerprint="$(cat deploy/setup.sh deploy/constraints.txt pyproject.toml | sha256sum | cut -d' ' -f1) $PWD"
for done in "$variant$extras" "$variant,dev"; do
    if [ "$(cat ".venv/.setup-$done" 2>/dev/null)" = "$fingerprint" ] &&
        .venv/bin/python -c "import mooncake.engine" 2>/dev/null; then
        echo "setup: ready ($done) in .venv (to start anew, remove .venv)"
        exit 0
    fi
done
packages="libibverbs1 librdmacm1 libnuma1 libcurl4"

# --- system libraries: Mooncake needs them even for TCP -------------------------------------------------------
missing=""
# In a variable: grep -q ends the pipe early, which pipefail would take for a missing library.
libraries=$(PATH="$PATH:/usr/sbin:/sbin" ldconfig -p)
for package in $packages; do
    grep -q "/${package%[0-9]*}\.so" <<<"$libraries" || missing="$missing $package"
done
if [ -n "$extras" ] && ! command -v make >/dev/null; then
    missing="$missing make"
fi
command -v python3 >/dev/null || { echo "setup: python3 (3.11 or newer) is needed: apt-get install python3" >&2; exit 1; }
python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"
if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "setup: there is no apt-get here; install by your system's means what Debian calls:$missing" >&2
        exit 1
    elif [ "$(id -u)" = 0 ]; then
        sudo=""
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        sudo="sudo"
    else
        echo "setup: these Debian packages are needed and may not be installed from here:$missing" >&2
        echo "setup: run  apt-get install$missing  as root, then this script again" >&2
        exit 1
    fi
    $sudo apt-get update -qq
    # shellcheck disable=SC2086
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null || {
        echo "setup: apt-get install$missing failed; install them by hand, then run this script again" >&2
        exit 1
    }
fi
python3 - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    print(f"setup: Python 3.11 or newer is needed, python3 is {sys.version.split()[0]}", file=sys.stderr)
    raise SystemExit(1)
PY

rm -f .venv/.setup-*
.venv/bin/python -m pip --version >/dev/null 2>&1 || python3 -m venv .venv
python=.venv/bin/python
pip="$python -m pip --disable-pip-version-check -q"

# --- exactly one Mooncake wheel: they overwrite each other's files ---------------------------------------------
case "$variant" in
cpu) mooncake=mooncake-transfer-engine-non-cuda ;;
cuda12) mooncake=mooncake-transfer-engine ;;
cuda13) mooncake=mooncake-transfer-engine-cuda13 ;;
esac
for other in mooncake-transfer-engine mooncake-transfer-engine-non-cuda mooncake-transfer-engine-cuda13; do
    if [ "$other" != "$mooncake" ] && $python -m pip show -q "$other" >/dev/null 2>&1; then
        echo "setup: removing $other, since $mooncake is wanted and only one may be installed" >&2
        $pip uninstall -y "$other" "$mooncake" >/dev/null 2>&1 || true
    fi
done

# --- torch: the cpu set-up must never take a CUDA build ---------------------------------------------------------
if [ "$variant" = cpu ]; then
    if ! $python -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$torch_version' or torch.version.cuda is not None)" 2>/dev/null; then
        report=$(mktemp)
        version=""
        if $pip install --dry-run --no-deps --ignore-installed --report "$report" "torch==$torch_version" >/dev/null 2>&1; then
            version=$($python -c "import json; print(json.load(open('$report'))['install'][0]['metadata']['version'])")
        fi
        rm -f "$report"
        case "$version" in
        *+cpu) $pip install "torch==$torch_version" ;;
        *) $pip install --index-url https://download.pytorch.org/whl/cpu "torch==$torch_version" ;;
        esac
    fi
fi
$pip install -c deploy/constraints.txt -e ".[$variant$extras]"
installed=$($python -m pip list --disable-pip-version-check --format=freeze 2>/dev/null | grep -c '^mooncake-transfer-engine' || true)
if [ "$installed" != 1 ]; then
    echo "setup: $installed Mooncake packages are installed, exactly $mooncake must be" >&2
    exit 1
fi
if [ "$variant" = cpu ]; then
    $python -c "import torch; assert torch.version.cuda is None, f'a CUDA build of torch was installed: {torch.__version__}'"
fi
$python -c "import mooncake.engine" 2>/dev/null || {
    echo "setup: mooncake can't be imported; on Debian: apt-get install $packages" >&2
    exit 1
}
echo "$fingerprint" >".venv/.setup-$variant$extras"
echo "setup: ready ($variant$extras) in .venv"
