# An aux peer in a container: keeps a run's swarm together, needs no GPU.
#
#   docker build -t tt .
#   docker run -p 31337:31337 -v tt:/data tt emoji
#
# Give --build-arg PIP_EXTRA_INDEX_URL=… (PyTorch's index of CPU builds) for a much smaller image.
FROM python:3.11-slim
ARG PIP_EXTRA_INDEX_URL=""
WORKDIR /opt/tt
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY scripts/constraints.txt scripts/
COPY configs configs
COPY tt_cli tt_cli
RUN pip install --no-cache-dir -c scripts/constraints.txt . \
    && useradd --create-home tt \
    && install -d -o tt -m 700 /data
USER tt
ENV TT_HOME=/data
VOLUME /data
EXPOSE 31337
ENTRYPOINT ["tt", "aux-peer"]
CMD ["emoji"]
