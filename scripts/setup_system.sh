#!/usr/bin/env bash
# Debian packages that rendering needs: MuJoCo draws through EGL (with Mesa's software driver where there is no GPU).
# Installs what is missing when it may, or says what to install. A machine without apt is left as it is.
set -euo pipefail
packages=(libegl1 libgl1 libgl1-mesa-dri)
command -v dpkg-query >/dev/null || exit 0
missing=()
for package in "${packages[@]}"; do
  dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
((${#missing[@]})) || exit 0
if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
  echo "Installing for rendering: ${missing[*]}"
  if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then
    exit 0
  fi
  echo "apt-get failed; going on without."
fi
echo "Missing for pixel rendering of MuJoCo environments: ${missing[*]}"
echo "Install them with: sudo apt-get install ${missing[*]}"
