# Covey with the versions that its tests run with. docs/gpu.md shows how it is built and run.
FROM python:3.11-slim

# Extras of pyproject.toml: EXTRAS=hub,cuda for NVIDIA GPUs, hub,tpu for TPUs.
ARG EXTRAS=hub
# The user of the container: with the number of your own, the files that it writes are yours.
ARG UID=1000

COPY pyproject.toml constraints.txt README.md LICENSE NOTICE /src/
COPY covey /src/covey
COPY plugins /src/plugins
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[${EXTRAS}]" && rm -r /src
RUN useradd --uid "${UID}" --home-dir /covey --create-home covey && mkdir /data && chown covey /data

USER covey
WORKDIR /data
ENTRYPOINT ["covey"]
CMD ["--help"]
