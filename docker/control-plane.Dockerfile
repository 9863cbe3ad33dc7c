# The control plane, without torch.  Build from the top of the project:
#
#     docker build -f docker/control-plane.Dockerfile -t unisono-control-plane .
#
# State lives in /data.  The first start prints the login link and the join command.
ARG BASE=python:3.11-slim
FROM ${BASE}

RUN useradd --uid 1000 --create-home unisono \
    && install -d -o unisono -g unisono -m 0700 /data /join

WORKDIR /opt/unisono
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY api/ api/
COPY collective/ collective/
COPY examples/ examples/
COPY migrations/ migrations/
COPY unisono/ unisono/
COPY web/ web/
COPY worker/ worker/
RUN pip install --no-cache-dir -c constraints.txt .

USER unisono
WORKDIR /data
ENV UNISONO_DATA_DIR=/data
VOLUME ["/data"]
EXPOSE 8700
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8700/readyz', timeout=4)"]
ENTRYPOINT ["unisono"]
CMD ["serve"]
