# The coordinator: CPU only, no torch, less than 400 MB, a quarter of it pyarrow. `make images` builds it; docs/docker.md says what can be set.
#
# BASE: a Debian-like image with Python 3.11 and pip, pinned. TRACKERS=1 adds 130 MB for TensorBoard,
# Weights & Biases and MLflow.
# Secrets, both optional: pip.conf (package index, credentials), ca.pem (certificates of a proxy; name it in pip.conf).
ARG BASE=python:3.11.14-slim-bookworm

FROM ${BASE} AS base

FROM base AS packages
ENV PIP_CONFIG_FILE=/run/secrets/pip.conf PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
RUN python3 -m venv --without-pip /opt/tandem
COPY requirements/lock.txt requirements/
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    python3 -m pip install --quiet --target /opt/build --no-deps "$(grep '^setuptools==' requirements/lock.txt)"
COPY requirements/images/coordinator.txt requirements/images/trackers.txt requirements/images/
ARG TRACKERS=0
RUN --mount=type=cache,target=/var/cache/pip --mount=type=secret,id=pip.conf --mount=type=secret,id=ca.pem \
    if [ "${TRACKERS}" = 1 ]; then extra="-r requirements/images/trackers.txt"; fi \
    && python3 -m pip --python /opt/tandem/bin/python install --quiet --no-deps --no-compile --only-binary :all: \
        -r requirements/images/coordinator.txt ${extra:-}
COPY deploy/images/shrink.py deploy/images/
RUN /opt/tandem/bin/python deploy/images/shrink.py

# Our own code, apart: when it changes, the layers with the packages stay.
FROM packages AS app
COPY pyproject.toml README.md LICENSE ./
COPY tandem_api tandem_api
COPY tandem_config tandem_config
COPY tandem_clients tandem_clients
COPY tandem_files tandem_files
COPY servicekit servicekit
COPY weightsync weightsync
COPY reward_service reward_service
COPY environment_service environment_service
COPY coordinator coordinator
COPY launcher launcher
RUN PYTHONPATH=/opt/build python3 -m pip install --quiet --no-deps --no-index --no-build-isolation --target /opt/app .

# The base without what only builds need: package managers, documentation, parts of Python's library. An image cannot
# give back what a layer below holds, so the rest moves into an image of its own.
FROM base AS root
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp tandem \
    && install -d -o tandem -g tandem /var/lib/tandem/run \
    && for python in /usr/lib/python3* /usr/local/lib/python3*; do \
        for part in ensurepip idlelib lib2to3 pydoc_data test tkinter turtledemo dist-packages site-packages; do \
            rm -rf "${python}/${part}"; \
        done; \
    done \
    && rm -rf /usr/share/doc /usr/share/man /usr/share/locale /usr/share/python-wheels /usr/lib/*-linux-gnu/perl-base \
        /usr/bin/perl* /usr/bin/apt* /usr/bin/dpkg* /usr/lib/apt /usr/lib/dpkg /var/cache/* /var/lib/apt \
        /usr/lib/*-linux-gnu/libapt-p* /usr/lib/*-linux-gnu/gconv

FROM scratch AS final
COPY --from=root / /
ENV PATH=/opt/tandem/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONSAFEPATH=1 PYTHONPATH=/opt/app
WORKDIR /var/lib/tandem
USER 10001:10001
ENTRYPOINT ["python", "-m", "coordinator"]
COPY --from=packages /opt/tandem /opt/tandem
COPY --from=app /opt/app /opt/app
COPY examples/arithmetic /opt/tandem/examples/arithmetic
COPY examples/calculator/tools.py /opt/tandem/examples/calculator/tools.py
COPY examples/reward_server /opt/tandem/examples/reward_server
ARG VERSION
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tandem-coordinator" \
      org.opencontainers.image.description="Conducts GRPO runs over trainer and rollout services" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
