# CPU:   docker build -t skyrl-train .
# CUDA:  docker build -t skyrl-train:cuda --build-arg DEVICE=cuda --build-arg EXTRAS=vllm .
# Build arguments: DEVICE (cpu or cuda); EXTRAS (extras of pyproject.toml, separated by spaces); UV_INDEX (a package index
# that takes precedence, for example one with CPU builds of torch, which save gigabytes).
ARG DEVICE=cpu

FROM python:3.12-slim-bookworm AS base-cpu

# The devel image has the compiler and headers for kernels that engines build when they start.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS base-cuda
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3 python3-dev python3-pip \
 && rm -rf /var/lib/apt/lists/*

# The page of `report` and `watch`.
FROM node:22-slim AS page
WORKDIR /page
COPY scripts/viewer scripts/
COPY viewer viewer
RUN scripts/viewer

# hadolint ignore=DL3006
FROM base-${DEVICE}
ARG EXTRAS="tools"
ARG UV_INDEX=""
# torch and Triton need a compiler; tools that run programs need bubblewrap and libseccomp2.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends bubblewrap g++ git libseccomp2 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 trainer \
 && install -d -o trainer /skyrl-train /data
USER 10001
WORKDIR /skyrl-train
COPY --chown=10001 . .
COPY --chown=10001 --from=page /page/skyrl_train/report/page skyrl_train/report/page
RUN scripts/bootstrap && rm -rf /home/trainer/.cache
# Checkpoints and caches are in the home folder by default. The volume keeps them after a container has ended.
ENV PATH=/skyrl-train/.venv/bin:$PATH HOME=/data
WORKDIR /data
VOLUME /data
ENTRYPOINT ["skyrl-train"]
CMD ["--help"]
