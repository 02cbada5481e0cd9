#!/usr/bin/env bash
# ACS redirect on PCI bridges (root ports, switch ports): while it is on, writes from GPU to GPU take
# the way through the IOMMU and can be lost. Ansible's role kernel_cmdline owns this file.
#   --check   lists the ports that redirect; exit 1 when there are any
#   --clear   clears Request Redirect and Completion Redirect; all other bits stay
set -Eeuo pipefail
: "${1:?usage: cleanslate-acs --check|--clear}"
redirect=$((0x0c))  # ACS control register: bit 2 P2P Request Redirect, bit 3 Completion Redirect

# Without root or setpci every port would look as if it had no such register.
if [ "$EUID" -ne 0 ] || ! command -v setpci >/dev/null; then
  echo "found user id $EUID, setpci: $(command -v setpci || echo none); wanted root and pciutils" >&2
  exit 2
fi

ports="$(lspci -D -d ::0604 | cut -d' ' -f1)"
found=0
for port in $ports; do
  # setpci fails on a port without the capability: nothing redirects there.
  control="$(setpci -s "$port" ECAP_ACS+6.w 2>/dev/null)" || continue
  if (((0x$control & redirect) == 0)); then continue; fi
  if [ "$1" = --clear ]; then
    setpci -s "$port" ECAP_ACS+6.w=0:c
    control="$(setpci -s "$port" ECAP_ACS+6.w)"
    if (((0x$control & redirect) == 0)); then echo "$port: cleared"; continue; fi
  fi
  echo "$port: redirects (ACS control 0x$control)"
  found=1
done
exit "$found"
