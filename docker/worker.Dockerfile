# A node: the agent and the Python in which jobs run.  Build from the top of the project, for CPUs:
#
#     docker build -f docker/worker.Dockerfile -t unisono-worker .
#
# and for NVIDIA GPUs (run it with --gpus all):
#
#     docker build -f docker/worker.Dockerfile -t unisono-worker-cuda \
#         --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 \
#         --build-arg EXTRAS=worker,cuda --build-arg PIP_ARGS= .
ARG BASE=python:3.11-slim
FROM ${BASE}

# what pip installs beside the agent; scikit-learn, for the example, comes with `demo`
ARG EXTRAS=demo
# PyPI's torch brings CUDA; for CPUs this index has one of a tenth of the size
ARG PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

# A CUDA base brings no Python.
RUN command -v python3 >/dev/null && python3 -c "import ensurepip" \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv \
        && rm -rf /var/lib/apt/lists/*)

# Ubuntu's images have a user 1000 already.
RUN (id -u 1000 >/dev/null 2>&1 || useradd --uid 1000 --create-home unisono) \
    && install -d -o 1000 -g 1000 -m 0700 /state /join

WORKDIR /opt/unisono
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY api/ api/
COPY collective/ collective/
COPY examples/ examples/
COPY migrations/ migrations/
COPY unisono/ unisono/
COPY web/ web/
COPY worker/ worker/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${PIP_ARGS} -c constraints.txt ".[${EXTRAS}]"

ENV PATH=/opt/venv/bin:$PATH
USER 1000
WORKDIR /state
VOLUME ["/state"]
EXPOSE 8701
ENTRYPOINT ["worker"]
CMD ["--help"]
