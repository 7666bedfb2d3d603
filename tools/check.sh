#!/bin/sh
# Checks what a machine must have before anything is downloaded: a Python >= 3.11 with venv and pip, a C++17
# compiler, disk. Says which package is missing on Debian, Fedora and Arch. Prints the interpreter to use on
# standard output, everything else on standard error. PYTHON names the interpreter; else the usual names are tried.
# Plain sh, because there may be no Python to run anything else.
set -u

failures=0
complain() { # what, Debian package, Fedora package, Arch package
    failures=$((failures + 1))
    printf 'strata: error: %s\n  try: Debian, Ubuntu: apt install %s | Fedora: dnf install %s | Arch: pacman -S %s\n' \
        "$1" "$2" "$3" "$4" >&2
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

python=""
if [ -n "${PYTHON:-}" ]; then
    if is_new_enough "$PYTHON"; then
        python=$PYTHON
    else
        complain "PYTHON=$PYTHON is no Python 3.11 or newer" "python3" "python3" "python"
    fi
else
    for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
        if command -v "$name" >/dev/null 2>&1 && is_new_enough "$name"; then
            python=$name
            break
        fi
    done
    [ -n "$python" ] || complain "no Python 3.11 or newer found ($(python3 --version 2>&1))" \
        "python3 (or a newer release's python3.11; then make PYTHON=python3.11)" "python3" "python"
fi

if [ -n "$python" ]; then
    "$python" -c 'import venv' >/dev/null 2>&1 || complain "$python has no venv module" "python3-venv" "python3" "python"
    "$python" -c 'import ensurepip' >/dev/null 2>&1 ||
        complain "$python cannot put pip into an environment (ensurepip is missing)" \
            "python3-venv python3-pip" "python3-pip" "python-pip"
fi

compiler=""
for name in ${CXX:-g++ clang++ c++}; do
    command -v "$name" >/dev/null 2>&1 && compiler=$name && break
done
if [ -z "$compiler" ]; then
    complain "no C++ compiler found (${CXX:-g++, clang++, c++})" "g++" "gcc-c++" "gcc"
else
    scratch=$(mktemp -d)
    printf '#include <optional>\nint main() { return std::optional<int>(0).value(); }\n' >"$scratch/probe.cpp"
    "$compiler" -std=c++17 "$scratch/probe.cpp" -o "$scratch/probe" >/dev/null 2>&1 ||
        complain "$compiler does not compile C++17 ($("$compiler" --version 2>&1 | head -n 1))" "g++" "gcc-c++" "gcc"
    rm -rf "$scratch"
fi

# 3 GiB hold the environment with a CPU build of PyTorch and pip's own copies on the way.
free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
if [ "${free_kib:-0}" -lt 3145728 ]; then
    failures=$((failures + 1))
    printf 'strata: error: %s MiB of disk free here, 3072 MiB are needed\n  try: free some space, or clone on a larger disk\n' \
        "$((${free_kib:-0} / 1024))" >&2
fi

[ "$failures" -eq 0 ] || exit 2
printf '%s\n' "$python"
