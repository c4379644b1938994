# syntax=docker/dockerfile:1
# docker build -f docker/edge.Dockerfile -t outrider-edge .
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
# hadolint ignore=DL3008 # the base image's tag decides the compiler's version
RUN apt-get update \
    && apt-get install -y --no-install-recommends cmake g++ make \
    && rm -rf /var/lib/apt/lists/*
# GGML_NATIVE=OFF builds for any CPU with AVX2 (x86-64) or ARMv8, not for the CPU of the machine that builds the image.
ARG CMAKE_ARGS=-DGGML_NATIVE=OFF
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt tools/llama_cpp_library.cmake ./
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/outrider \
    && CMAKE_ARGS="-DLLAVA_BUILD=OFF -DCMAKE_PROJECT_llama.cpp_INCLUDE=/src/llama_cpp_library.cmake $CMAKE_ARGS" \
        pip --python /opt/outrider/bin/python install -c constraints.txt llama-cpp-python
COPY pyproject.toml README.md LICENSE ./
COPY outrider outrider
COPY edge_agent edge_agent
COPY cloud_verifier cloud_verifier
COPY coordinator coordinator
RUN --mount=type=cache,target=/root/.cache/pip \
    pip --python /opt/outrider/bin/python install -c constraints.txt '.[edge,otel]'

FROM python:${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="outrider-edge" \
      org.opencontainers.image.description="Outrider: a device as an OpenAI-compatible server" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
# OpenMP runtime for llama.cpp.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /var/lib/outrider --create-home --shell /usr/sbin/nologin outrider
COPY --from=build /opt/outrider /opt/outrider
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    OUTRIDER_EDGE_CACHE_DIR=/var/lib/outrider \
    OUTRIDER_EDGE_SERVE_LISTEN=0.0.0.0:8080
USER 10001:10001
WORKDIR /var/lib/outrider
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --start-interval=2s \
    CMD ["python", "-m", "outrider.telemetry.healthcheck", "8080", "/ready"]
ENTRYPOINT ["outrider-edge"]
CMD ["serve"]
