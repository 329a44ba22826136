#!/usr/bin/env bash
# Builds images from this checkout: all three, or those named. `make images` calls it; docs/docker.md explains.
# Prints the `images:` of a kustomization that uses them, and nothing else, on stdout.
#
#   deploy/images/build.sh [coordinator] [trainer] [rollout]
#
#   VARIANT             of trainer and rollout: cpu (default) or gpu
#   REGISTRY            images are named REGISTRY/tandem/NAME:TAG; default: registry.invalid, the name of no registry
#   PUSH                1: push them to REGISTRY, and print their digests
#   PLATFORM            of the images, as linux/amd64; default: this machine's
#   TANDEM_PYTHON_BASE  base of the coordinator and of the cpu variants; default: that of the Dockerfiles
#   TANDEM_GPU_BASE     base of the gpu variants; default: SGLang's image of the version that is locked
#   TANDEM_VERSION      tag of the images; default: the version in pyproject.toml
#   TANDEM_TRACKERS     1: the coordinator has TensorBoard, Weights & Biases and MLflow, and is 130 MB larger
#   TORCH_INDEX_URL     index of torch's CPU builds, where the configured index has none
#   PIP_CONF, CA_PEM    files for pip while building (an index with credentials, a proxy's certificates); in no image
#   BUILD_NETWORK       network of the build: default, host or none
#   DOCKER              the docker command; it must know BuildKit
set -euo pipefail
cd "$(dirname "$0")/../.."
export DOCKER_BUILDKIT=1

fail() {
    printf 'images: %s\n' "$*" >&2
    exit 1
}

build() {
    local image=$1 tag=$2 base=$3
    shift 3
    local name="$registry/tandem/$image"
    local options=(--file "deploy/images/$image.Dockerfile" --tag "$name:$tag")
    options+=(--build-arg "VERSION=$version" --build-arg "REVISION=$revision")
    [ -z "$base" ] || options+=(--build-arg "BASE=$base")
    [ -z "${PIP_CONF:-}" ] || options+=(--secret "id=pip.conf,src=$PIP_CONF")
    [ -z "${CA_PEM:-}" ] || options+=(--secret "id=ca.pem,src=$CA_PEM")
    [ -z "${BUILD_NETWORK:-}" ] || options+=(--network "$BUILD_NETWORK")
    [ -z "${PLATFORM:-}" ] || options+=(--platform "$PLATFORM")
    echo "images: $name:$tag" >&2
    "${DOCKER:-docker}" build "${options[@]}" "$@" . >&2
    if [ "$push" = 1 ]; then
        "${DOCKER:-docker}" push "$name:$tag" >&2
        add_image "$image" "$name" "digest: $(digest_of "$name" "$tag")"
    else
        add_image "$image" "$name" "newTag: $tag"
    fi
}

# What the registry calls the image that was pushed: sha256:... of its manifest.
digest_of() {
    local name=$1 tag=$2 found
    found=$("${DOCKER:-docker}" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$name:$tag" \
        | sed -n "s|^$name@\(sha256:[0-9a-f]\{64\}\)$|\1|p" | head -n 1)
    [ -n "$found" ] || fail "$name:$tag was pushed, but Docker knows no digest of it in $registry"
    printf '%s' "$found"
}

add_image() {
    stanza+="  - name: registry.invalid/tandem/$1"$'\n'
    [ "$2" = "registry.invalid/tandem/$1" ] || stanza+="    newName: $2"$'\n'
    stanza+="    $3"$'\n'
}

build_engine() {
    local image=$1
    case "${VARIANT:-cpu}" in
        cpu) build "$image" "$version-cpu" "${TANDEM_PYTHON_BASE:-}" --target cpu --build-arg "TORCH_INDEX_URL=${TORCH_INDEX_URL:-}" ;;
        gpu) build "$image" "$version" "${TANDEM_GPU_BASE:-lmsysorg/sglang:v0.5.23}" --target gpu ;;
        *) fail "VARIANT=$VARIANT: cpu or gpu" ;;
    esac
}

version=${TANDEM_VERSION:-$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)}
registry=${REGISTRY:-registry.invalid}
push=${PUSH:-0}
stanza="images:"$'\n'
case "$push" in 0 | 1) ;; *) fail "PUSH=$push: 1 or 0" ;; esac
# Docker takes a first part without dot and port for a user of docker.io.
[[ "$registry" =~ ^(localhost|[a-z0-9-]+(\.[a-z0-9-]+)+|[a-z0-9.-]+:[0-9]+)(:[0-9]+)?(/[a-z0-9._-]+)*$ ]] \
    || fail "REGISTRY=$registry: the host of a registry, as registry.example.com or registry.example.com/team"
[ "$push" = 0 ] || [ "$registry" != registry.invalid ] || fail "PUSH=1 needs REGISTRY: where to"
revision=$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
[ $# -gt 0 ] || set -- coordinator trainer rollout
for image in "$@"; do
    case "$image" in
        coordinator) build coordinator "$version" "${TANDEM_PYTHON_BASE:-}" --build-arg "TRACKERS=${TANDEM_TRACKERS:-0}" ;;
        trainer) build_engine trainer ;;
        rollout) build_engine rollout ;;
        *) fail "no image '$image'; there are coordinator, trainer and rollout" ;;
    esac
done
printf '%s' "$stanza"
