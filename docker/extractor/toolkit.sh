#!/usr/bin/env bash
# Makes a folder that looks like an installed CUDA toolkit out of the packages of a virtual
# environment, for the JIT of FlashInfer, Triton and SGLang: nvcc finds its own headers there, and the
# linker its lib64, names without versions and a stub of the driver, which the packages lack.
set -Eeuo pipefail
usage="usage: toolkit.sh VENV FOLDER"
packages="${1:?$usage}/lib/python3.11/site-packages/nvidia/cu13" folder="${2:?$usage}"

mkdir -p "$folder/lib64/stubs"
for part in bin include nvvm; do ln -s "$packages/$part" "$folder/$part"; done
for library in "$packages"/lib/lib*; do
  name="$(basename "$library")"
  ln -s "$library" "$folder/lib64/$name"
  case "$name" in *.so.*) ln -sf "$library" "$folder/lib64/${name%%.so.*}.so" ;; esac
done
gcc -shared -Wl,-soname,libcuda.so.1 -x c -o "$folder/lib64/stubs/libcuda.so" /dev/null

# The proof: a kernel for the newest cards compiles, and links as FlashInfer links.
proof="$(mktemp -d)"
echo '__global__ void nothing() {}' >"$proof/nothing.cu"
"$folder/bin/nvcc" -arch=sm_120a -Xcompiler -fPIC -c -o "$proof/nothing.o" "$proof/nothing.cu"
c++ -shared -o "$proof/nothing.so" "$proof/nothing.o" -L"$folder/lib64" -L"$folder/lib64/stubs" \
  -lcudart -lcuda
"$folder/bin/nvcc" --version | tail -n 2
rm -f -- "$proof"/*
rmdir -- "$proof"
