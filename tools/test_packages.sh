#!/usr/bin/env bash
# Debian packages whose programs the tests use where they find them; what is missing is skipped by name. Needs root.
# usage: tools/test_packages.sh [all]   (all: also what only `make test-all` uses)
set -euo pipefail

packages=(redis-server prometheus chromium)
if [ "${1:-}" = all ]; then packages+=(docker.io debootstrap docker-compose); fi

missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
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
