# Part of ./dev: install what is missing, and nothing that is there.  Sourced; defines say, die, need_system, need_command, need_venv, need_nvcc, venv.

venv=build/venv
started=$SECONDS
if [[ -t 1 && -z ${CI:-} ]]; then bold=$'\e[1m' plain=$'\e[0m'; else bold= plain=; fi

say() { printf '%s[%3ds] %s%s\n' "$bold" $((SECONDS - started)) "$*" "$plain"; }
die() { printf 'dev: %s\n' "$*" >&2; exit 1; }

# Debian package and how to see that its content is there.
system_packages=(
  "cmake         command -v cmake"
  "ninja-build   command -v ninja"
  "g++           command -v g++"
  "pkg-config    command -v pkg-config"
  "python3       command -v python3"
  "python3-venv  python3 -c 'import ensurepip'"
  "python3-dev   python3 -c 'import os, sysconfig; os.stat(os.path.join(sysconfig.get_paths()[\"include\"], \"Python.h\"))'"
  "libzstd-dev   has_header zstd.h"
  "libcjson-dev  has_header cjson/cJSON.h"
  "libcli11-dev  has_header CLI/CLI.hpp"
  "libcatch2-dev has_header catch2/catch_test_macros.hpp"
)

has_header() { printf '#include <%s>\n' "$1" | g++ -x c++ -std=c++20 -fsyntax-only - 2>/dev/null; }

need_system() {
  local line package missing=()
  for line in "${system_packages[@]}"; do
    read -r package check <<<"$line"
    eval "$check" >/dev/null 2>&1 || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then return; fi
  if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
    die "missing: ${missing[*]} (Debian's names); install them, or run this once as root on Debian"
  fi
  say "install ${missing[*]}"
  mkdir -p build/log
  apt_quiet update
  if [[ " ${missing[*]} " == *" libcatch2-dev "* ]] && ! apt-cache show libcatch2-dev >/dev/null 2>&1; then add_backports; fi
  apt_quiet install --no-install-recommends "${missing[@]}"
}

apt_quiet() {
  DEBIAN_FRONTEND=noninteractive apt-get -y -q "$@" >build/log/apt.log 2>&1 || { tail -n 20 build/log/apt.log >&2; die "apt-get $* failed"; }
}

# Where the packages of the release itself come from.
debian_archive() {
  local codename
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | awk -v r="$codename" '$2 == r { print $1; exit }'
}

# Catch2 v3 is only in the backports of Debian 12.  Their archive is the one that the release itself comes from.
add_backports() {
  local codename archive
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  archive=$(debian_archive)
  if [[ -z $archive ]]; then die "missing: libcatch2-dev (Catch2 v3), and no Debian archive is set up to take it from"; fi
  say "add $codename-backports for libcatch2-dev"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $codename-backports main" \
    >/etc/apt/sources.list.d/kvq-backports.list
  apt_quiet update
}

need_command() {
  local name
  for name in "$@"; do command -v "$name" >/dev/null || die "missing: $name on the PATH"; done
}

# nvcc of the PATH or of CUDACXX; where there is none, NVIDIA's packages from PyPI, which need no driver.
need_nvcc() {
  if [[ -n ${CUDACXX:-} ]] || command -v nvcc >/dev/null; then return; fi
  need_venv cuda
  local toolkit
  toolkit=$(echo "$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13)
  [[ -x $toolkit/bin/nvcc ]] || die "missing: nvcc (CUDA 12.8 or later)"
  export CUDACXX=$toolkit/bin/nvcc NVCC_PREPEND_FLAGS=-L$toolkit/lib
}

# need_venv [EXTRA...]: build/venv with bindings/python/requirements.txt and requirements-EXTRA.txt, once per content of the files.
need_venv() {
  local name file stamp
  for name in "" "${@/#/-}"; do
    file=bindings/python/requirements$name.txt
    stamp=$venv/installed$name.txt
    if [[ ! -f $file ]] || cmp -s "$file" "$stamp"; then continue; fi
    if [[ ! -x $venv/bin/python ]]; then
      say "create $venv"
      python3 -m venv "$venv"
    fi
    say "install $file"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$file" || die "missing: a Python package of $file"
    cp "$file" "$stamp"
  done
}
