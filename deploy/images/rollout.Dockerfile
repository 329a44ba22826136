# A rollout replica: one SGLang engine in a container. `make images` builds it; see docs/docker.md.
#
# Target `gpu` (the last, so the default) on BASE = SGLang's image, the same for trainer and rollout, so that both have
# one torch and one NCCL; target `cpu` on BASE = a Debian-like image with Python 3.11 and pip. Pinned by the caller.
# TORCH_INDEX_URL: `cpu` only, an index of torch's CPU builds where the configured index has none.
# Secrets, both optional: pip.conf (package index, credentials), ca.pem (certificates of a proxy; name it in pip.conf).
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS base
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp tandem \
    && install -d -o tandem -g tandem /var/lib/tandem/run

# pip and setuptools for the two stages that install; PIP_CONSTRAINT: a base may pin what we bring ourselves.
FROM base AS installer
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore PIP_CONSTRAINT=
WORKDIR /src
COPY requirements/lock.txt requirements/torch.txt requirements/torch-cuda.txt requirements/
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m pip install --quiet --target /opt/build --no-deps "$(grep '^setuptools==' requirements/lock.txt)"

FROM installer AS cpu-packages
RUN python3 -m venv --without-pip /opt/tandem
ARG TORCH_INDEX_URL=
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m pip --python /opt/tandem/bin/python install --quiet --only-binary :all: \
        ${TORCH_INDEX_URL:+--extra-index-url "${TORCH_INDEX_URL}"} \
        -c requirements/lock.txt -c requirements/torch-cuda.txt -r requirements/torch.txt
COPY requirements/images/rollout.txt requirements/images/
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m pip --python /opt/tandem/bin/python install --quiet --no-deps --only-binary :all: \
        -r requirements/images/rollout.txt

FROM installer AS gpu-packages
COPY deploy/images/check_base.py deploy/images/
COPY requirements/cuda-3.11.txt requirements/cuda-3.12.txt requirements/
RUN python3 deploy/images/check_base.py requirements/cuda-3.11.txt requirements/cuda-3.12.txt \
    && python3 -m venv --without-pip --system-site-packages /opt/tandem
COPY requirements/images/rollout-gpu.txt requirements/images/
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m pip --python /opt/tandem/bin/python install --quiet --no-deps --only-binary :all: \
        -r requirements/images/rollout-gpu.txt

# What SGLang compiles when an engine starts, for Hopper and Blackwell: an engine finds it in /opt/tandem/jit.
FROM gpu-packages AS gpu-kernels
COPY servicekit/__init__.py servicekit/cuda.py servicekit/
COPY deploy/images/compile_kernels.py deploy/images/
RUN for generation in 9.0 10.0; do \
        PYTHONPATH=. /opt/tandem/bin/python deploy/images/compile_kernels.py /opt/jit $generation || exit 1; \
    done

# Our own code, apart: when it changes, the layers with the packages stay. The base may have a newer Python than the
# lock is for.
FROM installer AS app
COPY pyproject.toml README.md LICENSE ./
COPY tandem_api tandem_api
COPY tandem_config tandem_config
COPY tandem_files tandem_files
COPY servicekit servicekit
COPY weightsync weightsync
COPY rollout_service rollout_service
RUN PYTHONPATH=/opt/build python3 -m pip install --quiet --no-deps --no-index --no-build-isolation \
        --ignore-requires-python --target /opt/app .

FROM base AS service
ENV PATH=/opt/tandem/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 \
    PYTHONPATH=/opt/app LOGNAME=tandem
WORKDIR /var/lib/tandem
USER 10001:10001
ENTRYPOINT ["python", "-m", "rollout_service"]
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-rollout" \
      org.opencontainers.image.description="SGLang rollout replica of GRPO runs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

FROM service AS cpu
ENV OMP_NUM_THREADS=1
COPY --from=cpu-packages /opt/tandem /opt/tandem
COPY --from=app /opt/app /opt/app
COPY examples/arithmetic /opt/tandem/examples/arithmetic

FROM service AS gpu
COPY --from=gpu-packages /opt/tandem /opt/tandem
COPY --from=gpu-kernels /opt/jit /opt/tandem/jit
COPY --from=app /opt/app /opt/app
COPY examples/arithmetic /opt/tandem/examples/arithmetic
