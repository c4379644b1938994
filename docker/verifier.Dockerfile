# syntax=docker/dockerfile:1
# docker build -f docker/verifier.Dockerfile -t outrider-verifier .
# For NVIDIA GPUs: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg PACKAGES="gcc libc6-dev"
# docker build -f docker/verifier.Dockerfile --target verifier-vllm -t outrider-verifier-vllm .
# For CPUs: --build-arg VLLM_OPTIONS= --build-arg PACKAGES= --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# torch alone comes from its own index, which also has old copies of what it needs.
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/outrider \
    && pip --python /opt/outrider/bin/python install -c constraints.txt --no-deps --index-url "$TORCH_INDEX" torch
COPY pyproject.toml README.md LICENSE ./
COPY outrider outrider
COPY edge_agent edge_agent
COPY cloud_verifier cloud_verifier
COPY coordinator coordinator
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/outrider/bin/python install -c constraints.txt '.[verifier,otel]'

FROM python:${PYTHON} AS build-vllm
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# Only what makes vLLM's environment, so that it is not made again for other changes.
COPY cloud_verifier/__init__.py cloud_verifier/vllm_environment.py cloud_verifier/
COPY cloud_verifier/engine/vllm_backend/requirements.txt cloud_verifier/engine/vllm_backend/
ARG VLLM_OPTIONS=--gpu
ARG PIP_EXTRA_INDEX_URL=
# Python packages beside vLLM: ray for a verifier of several nodes.
ARG VLLM_PACKAGES=
# hadolint ignore=SC2086
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m cloud_verifier.vllm_environment /opt/vllm $VLLM_OPTIONS \
    && if [ -n "$VLLM_PACKAGES" ]; then /opt/vllm/bin/python -m pip install $VLLM_PACKAGES; fi \
    && /opt/vllm/bin/python -m pip uninstall --yes pip
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY outrider outrider
COPY edge_agent edge_agent
COPY cloud_verifier cloud_verifier
COPY coordinator coordinator
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/outrider \
    && pip --python /opt/outrider/bin/python install -c constraints.txt '.[verifier-vllm,otel]'

FROM python:${PYTHON} AS run
RUN useradd --uid 10001 --home-dir /var/lib/outrider --create-home --shell /usr/sbin/nologin outrider
# Caches of compiled kernels go where a read-only container can write.
# MALLOC_* have glibc give freed memory back, even after a message of a megabyte.
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2 \
    MALLOC_MMAP_THRESHOLD_=131072 \
    MALLOC_TRIM_THRESHOLD_=131072 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    HF_HOME=/tmp/huggingface \
    TRITON_CACHE_DIR=/tmp/triton \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    OUTRIDER_VERIFIER_LISTEN=0.0.0.0:7710 \
    OUTRIDER_VERIFIER_METRICS=0.0.0.0:9110
WORKDIR /var/lib/outrider
EXPOSE 7710 9110
# Drains: OUTRIDER_VERIFIER_DRAIN_S seconds at most, which docker's stop timeout must exceed.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --start-interval=2s \
    CMD ["python", "-m", "outrider.telemetry.healthcheck", "9110"]
ENTRYPOINT ["outrider-verifier"]

FROM run AS verifier-vllm
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="outrider-verifier-vllm" \
      org.opencontainers.image.description="Outrider: serves one target model to many devices, computed by vLLM" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Debian packages: on a GPU vLLM compiles kernels when it starts; on a CPU it needs none.
ARG PACKAGES="g++ gcc libc6-dev"
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends $PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build-vllm /opt/vllm /opt/vllm
COPY --from=build-vllm /opt/outrider /opt/outrider
ENV XDG_CACHE_HOME=/tmp/cache \
    XDG_CONFIG_HOME=/tmp/config \
    FLASHINFER_WORKSPACE_BASE=/tmp \
    OUTRIDER_VERIFIER_ENGINE=vllm \
    OUTRIDER_VERIFIER_ENGINE_PYTHON=/opt/vllm/bin/python
USER 10001:10001

FROM run
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="outrider-verifier" \
      org.opencontainers.image.description="Outrider: serves one target model to many devices" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# Debian packages: none for CPUs; on a GPU triton compiles its driver interface when it starts.
ARG PACKAGES=
# hadolint ignore=DL3008,SC2086
RUN if [ -n "$PACKAGES" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends $PACKAGES \
        && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/outrider /opt/outrider
USER 10001:10001
