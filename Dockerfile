# An aux peer in a container: keeps a run's swarm together, needs no GPU.
#
#   docker build -t tt .
#   docker run -d -p 31337:31337 -p 127.0.0.1:8471:8471 --shm-size 2g -v tt:/data tt emoji
#
# A trainer on a GPU (NVIDIA's container toolkit on the host):
#
#   docker build -t tt-cuda --build-arg TORCH=cuda .
#   docker run --gpus all --no-healthcheck --shm-size 2g -v tt:/data --entrypoint tt tt-cuda join emoji --plain --peer /ip4/…
FROM python:3.11-slim AS build
# cpu: PyTorch's CPU wheels, some 200 MB; cuda: those of PyPI with NVIDIA's libraries, several GB.
ARG TORCH=cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY scripts/constraints.txt scripts/
RUN python -m venv /opt/tt \
    && case "$TORCH" in \
        cpu) index="--index-url $TORCH_CPU_INDEX" ;; \
        cuda) index="" ;; \
        *) echo "TORCH is cpu or cuda, not $TORCH" >&2; exit 1 ;; \
    esac \
    && version="$(sed -n 's/^torch==//p' scripts/constraints.txt)" \
    && if [ "$TORCH" = cpu ]; then version="$version+cpu"; fi \
    && /opt/tt/bin/pip install --no-cache-dir $index "torch==$version"
COPY configs configs
COPY docs/notebooks docs/notebooks
COPY docs/troubleshooting.md docs/
COPY tt_cli tt_cli
RUN /opt/tt/bin/pip install --no-cache-dir -c scripts/constraints.txt ".[lm,numba,postgres]"

FROM python:3.11-slim
ARG TORCH=cpu
# Triton compiles a GPU's elementwise kernels with a C compiler and Python.h, which this image's Python brings.
RUN if [ "$TORCH" = cuda ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/tt /opt/tt
RUN useradd --uid 10001 --create-home tt && install -d -o tt -g tt -m 700 /data
USER tt
ENV PATH=/opt/tt/bin:$PATH TT_HOME=/data HF_HOME=/data/hub PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 31337 8470 8471
# The page's own /health: 503 where a part has failed.
HEALTHCHECK --interval=30s --timeout=10s --start-period=120s --retries=4 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8471/health', timeout=8)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["tt", "aux-peer"]
CMD ["emoji"]
