#!/bin/sh
# Installs the project, writes the SBOM, and takes out of the environment what no service runs:
# install-project.sh SOURCE VENV TOOLS
set -eu
source=$1 venv=$2 tools=$3
python="$venv/bin/python"
"$tools/bin/python" -m pip wheel --disable-pip-version-check -q --no-deps --no-build-isolation --no-index \
    -w /dist "$source"
"$python" -m pip install --disable-pip-version-check -q --no-index --no-deps --no-compile /dist/*.whl
"$python" -m pip --disable-pip-version-check check
"$python" -m pip --disable-pip-version-check uninstall -q -y pip
"$tools/bin/cyclonedx-py" environment "$python" --pyproject "$source/pyproject.toml" --output-reproducible \
    --of JSON -o "$venv/sbom.cdx.json"
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# Headers, static libraries and test programs of torch: for those who build against it.
rm -rf "$packages/torch/include" "$packages/torch/share/cmake" "$packages/torch/test"
find "$packages/torch/bin" -type f ! -name torch_shm_manager -delete
find "$packages" -name '*.a' -delete
find "$venv" -name __pycache__ -prune -exec rm -rf {} +
# The file system is read-only later: compiled now, and checked by nothing that depends on file times.
"$python" -m compileall -q -j 0 --invalidation-mode unchecked-hash "$packages" || true
