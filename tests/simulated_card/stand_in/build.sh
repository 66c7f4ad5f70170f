#!/usr/bin/env bash
# Builds the simulated card (stub CANN): stand-ins for CANN's libraries, to put under the real torch_npu.
#
#   build.sh TORCH_SITE NPU_SITE OUT
#
# TORCH_SITE: the folder that holds torch; NPU_SITE: the one that holds torch_npu, installed with
# `pip install --no-deps --target`; OUT: where the libraries go.
set -euo pipefail
torch=$(realpath "$1")/torch npu=$(realpath "$2")/torch_npu out=$(mkdir -p "$3" && realpath "$3")
cd "$(dirname "$0")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The libraries of CANN's that torch_npu is linked to must hold every symbol that nothing else provides.
# First what torch, its own libraries and the C library provide ...
symbols() { nm -D "$1" "$2" 2>/dev/null | awk '$1 != "w" {print $NF}' | sed 's/@.*//' || true; }
{ for library in "$torch"/lib/*.so* "$npu"/lib/*.so \
    $(ldd "$torch"/lib/libtorch_cpu.so | awk '$3 ~ /^\// {print $3}') /lib*/ld-linux-*.so.*; do
    [ ! -e "$library" ] || symbols --defined-only "$library"
  done; } | sort -u >"$work/provided"
# ... then what torch_npu wants beyond that; what begins with Py is the interpreter's.
{ for library in "$npu"/lib/lib{torch_npu,tensorpipe,npu_profiler}.so "$npu"/_C*.so; do
    symbols --undefined-only "$library"
  done; } | sort -u | comm -23 - "$work/provided" | { grep -v '^_\?Py' || true; } >"$work/wanted"

# Every wanted function that ascendcl.cpp does not define becomes a stub with a fitting return code.
g++ -std=c++17 -O1 -fPIC -w -I"$npu/include" -c -o "$work/ascendcl.o" ascendcl.cpp
nm --defined-only "$work/ascendcl.o" | awk '{print $NF}' | sort -u >"$work/defined"
{ echo '#include <stdio.h>'
  echo '#include <stdlib.h>'
  echo 'static int stub(const char *name, int code) {'
  echo '  if (getenv("FAKE_TRACE")) fprintf(stderr, "[simulated card] stub %s\n", name);'
  echo '  return code;'
  echo '}'
  comm -23 "$work/wanted" "$work/defined" | while read -r name; do
    case $name in
      Msprof* | aclSetTensor* | aclDestroy* | aclmdl*) code=0 ;;
      aclop*) code=500004 ;;  # not supported
      *) code=207000 ;;       # feature not supported by the runtime
    esac
    echo "int $name(void) { return stub(\"$name\", $code); }"
  done; } >"$work/stubs.c"
gcc -fPIC -w -c -o "$work/stubs.o" "$work/stubs.c"
g++ -shared -o "$out/libascendcl.so" "$work/ascendcl.o" "$work/stubs.o"

# torch_npu is linked to these too, but nothing of them is called.
for name in hccl ge_runner graph acl_tdt_channel; do
  gcc -x c -shared -fPIC -o "$out/lib$name.so" /dev/null
done

g++ -std=c++17 -shared -fPIC -w -I"$npu/include" -o "$out/libacl_op_compiler.so" op_compiler.cpp \
  -L"$out" -Wl,--no-as-needed -lascendcl
g++ -std=c++20 -O1 -shared -fPIC -w -I"$npu/include" -I"$torch/include" -I"$torch/include/torch/csrc/api/include" \
  -o "$out/libopapi.so" opapi.cpp -L"$torch/lib" -lc10 -ltorch_cpu -L"$out" -Wl,--no-as-needed -lascendcl
