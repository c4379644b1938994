# syntax=docker/dockerfile:1
# docker build -f docker/coordinator.Dockerfile -t outrider-coordinator .
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY outrider outrider
COPY edge_agent edge_agent
COPY cloud_verifier cloud_verifier
COPY coordinator coordinator
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m venv --without-pip /opt/outrider \
    && pip --python /opt/outrider/bin/python install -c constraints.txt '.[coordinator,otel]'

FROM python:${PYTHON}
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="outrider-coordinator" \
      org.opencontainers.image.description="Outrider: places sessions on verifiers; brings the operator's command" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --uid 10001 --home-dir /var/lib/outrider --create-home --shell /usr/sbin/nologin outrider
COPY --from=build /opt/outrider /opt/outrider
# MALLOC_* have glibc give freed memory back, even after a message of a megabyte.
ENV PATH=/opt/outrider/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2 \
    MALLOC_MMAP_THRESHOLD_=131072 \
    MALLOC_TRIM_THRESHOLD_=131072 \
    PYTHONDONTWRITEBYTECODE=1 \
    OUTRIDER_COORDINATOR_LISTEN=0.0.0.0:7700 \
    OUTRIDER_COORDINATOR_STATE_DIR=/var/lib/outrider \
    OUTRIDER_COORDINATOR_METRICS=0.0.0.0:9100
USER 10001:10001
WORKDIR /var/lib/outrider
EXPOSE 7700 9100
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --start-interval=1s \
    CMD ["python", "-m", "outrider.telemetry.healthcheck", "9100"]
ENTRYPOINT ["outrider-coordinator"]
