#!/bin/sh
# Chromium and its driver for the browser tests, where Debian's packages can be had. Says nothing when they are there.
set -eu
command -v chromium >/dev/null && command -v chromedriver >/dev/null && exit 0
if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
    echo "chromium and chromedriver are not installed, and only root can install them: the browser tests will be skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-liberation >/dev/null
