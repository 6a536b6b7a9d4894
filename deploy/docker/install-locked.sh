#!/bin/sh
# Installs a lock into a virtual environment: install-locked.sh VENV LOCK. Every file must have a hash in the lock.
# /inputs may hold pip.conf, ca.crt and wheels/, see the Dockerfile.
set -eu
venv=$1 lock=$2
[ ! -f /inputs/pip.conf ] || export PIP_CONFIG_FILE=/inputs/pip.conf
[ ! -f /inputs/ca.crt ] || export PIP_CERT=/inputs/ca.crt
if ls /inputs/wheels/*.whl >/dev/null 2>&1; then
    source="--no-index --find-links /inputs/wheels"
else
    source="--extra-index-url $TORCH_INDEX"
fi
# --no-deps: the lock is complete, which pip check verifies. Bytecode is compiled later, reproducibly.
# shellcheck disable=SC2086
"$venv/bin/python" -m pip install --disable-pip-version-check --no-cache-dir --no-compile --only-binary :all: \
    --require-hashes --no-deps $source -q -r "$lock"
"$venv/bin/python" -m pip --disable-pip-version-check check
