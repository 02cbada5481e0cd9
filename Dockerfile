# The two images: `trainer`, and `extractor` with SGLang. `make images` builds them (docker/images.sh).
# For the classic builder and BuildKit alike. Build stages do all network work and alone see
# docker/inputs; the final stages take from them the packages, then the package itself.
ARG BASE=cleanslate-base:local
ARG EXTRACTOR_BASE=cleanslate-base:local

FROM ${BASE} AS trainer-build
WORKDIR /build
COPY docker/inputs docker/inputs
COPY docker/with-inputs.sh docker/setup.sh docker/
COPY docker/trainer docker/trainer
RUN bash docker/with-inputs.sh bash docker/setup.sh python3 /opt/cleanslate \
      docker/trainer/requirements.txt packages-only \
    && rm /opt/cleanslate/setup.log /opt/cleanslate/ready
COPY VERSION README.md pyproject.toml ./
COPY pipeline pipeline
RUN PYTHONDONTWRITEBYTECODE=1 /opt/cleanslate/bin/python -m pip install --quiet --no-deps --no-index \
      --no-build-isolation --no-cache-dir --prefix /package .
LABEL cleanslate.build=trainer

FROM ${BASE} AS trainer
COPY --from=trainer-build /opt/cleanslate /opt/cleanslate
COPY --from=trainer-build /package /opt/cleanslate
# The caller's user has no name inside; torch asks for one.
ENV PATH=/opt/cleanslate/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp LOGNAME=cleanslate \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
CMD ["cleanslate", "--help"]
ARG VERSION
ARG COMMIT
LABEL cleanslate.image=trainer \
      org.opencontainers.image.title="Cleanslate trainer" \
      org.opencontainers.image.description="Every stage but those that run SGLang" \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${COMMIT}

FROM ${EXTRACTOR_BASE} AS extractor-build
ARG VARIANT=cuda
WORKDIR /build
COPY docker/inputs docker/inputs
COPY docker/with-inputs.sh docker/setup-sglang-cpu.sh docker/
COPY docker/extractor/requirements-${VARIANT}.txt docker/extractor/
# The CUDA build of torch is the index's, as is all else that SGLang names; on the CPU, our list.
RUN if [ "$VARIANT" = cpu ]; then \
      bash docker/with-inputs.sh bash docker/setup-sglang-cpu.sh python3 /opt/cleanslate packages-only \
      && rm /opt/cleanslate/setup.log /opt/cleanslate/ready /opt/cleanslate/torch.txt; \
    else \
      python3 -m venv /opt/cleanslate \
      && bash docker/with-inputs.sh /opt/cleanslate/bin/python -m pip install --progress-bar off \
        --disable-pip-version-check --no-deps --require-hashes \
        -r docker/extractor/requirements-cuda.txt; \
    fi
COPY docker/extractor docker/extractor
COPY VERSION README.md pyproject.toml ./
COPY pipeline pipeline
RUN install="/opt/cleanslate/bin/python -m pip install --quiet --no-deps --no-index \
      --no-build-isolation --no-cache-dir --prefix /package/opt/cleanslate"; \
    export PYTHONDONTWRITEBYTECODE=1; \
    $install . && \
    if [ "$VARIANT" = cpu ]; then $install docker/extractor/cpu; \
    else bash docker/extractor/toolkit.sh /opt/cleanslate /package/usr/local/cuda; fi
# SGLang only logs a hook that it cannot set: here each must find its place, or there is no image.
RUN PYTHONDONTWRITEBYTECODE=1 /opt/cleanslate/bin/python -m pipeline.capture.sglang_plugin.resolve
LABEL cleanslate.build=extractor

FROM ${EXTRACTOR_BASE} AS extractor
COPY --from=extractor-build /opt/cleanslate /opt/cleanslate
COPY --from=extractor-build /package /
# The CUDA variant has nvcc, for kernels that are compiled when they are first used.
ENV PATH=/opt/cleanslate/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp \
    LOGNAME=cleanslate PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
HEALTHCHECK --interval=60s --timeout=30s --retries=3 \
  CMD ["/opt/cleanslate/bin/python", "-m", "pipeline.capture.sglang_health"]
CMD ["cleanslate", "--help"]
ARG VARIANT=cuda
ARG VERSION
ARG COMMIT
LABEL cleanslate.image=extractor \
      cleanslate.variant=${VARIANT} \
      org.opencontainers.image.title="Cleanslate extractor" \
      org.opencontainers.image.description="SGLang with the capture, and the stages that run it" \
      org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${COMMIT}
