#!/usr/bin/env bash
# What building and testing the web pages needs: Debian's Chromium, Node, and the packages of web/package-lock.json.
# Installs what is missing when it may, or says what to install.
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || missing+=(chromium)
command -v node >/dev/null || missing+=(nodejs)
command -v npm >/dev/null || missing+=(npm)
if ((${#missing[@]})); then
  if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
    echo "Installing for the web pages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    echo "Missing for the web pages: ${missing[*]}. Install them with: sudo apt-get install ${missing[*]}"
    exit 1
  fi
fi
if [[ ! web/node_modules/.package-lock.json -nt web/package-lock.json ]]; then
  (cd web && npm ci --no-audit --no-fund --loglevel=error && touch node_modules/.package-lock.json)
fi
