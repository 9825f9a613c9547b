# Part of ./dev: another processor without having one.  Sourced; needs say, die and apt_quiet of setup.sh.

arm=build/aarch64

# Cross compiler and emulator from the system, as everything of ./dev; Debian's arm64 build of what the tests link with, unpacked below
# the build folder: package lists of their own keep the machine's configuration as it is.
need_arm() {
  system_packages+=("g++-aarch64-linux-gnu command -v aarch64-linux-gnu-g++" "qemu-user command -v qemu-aarch64")
  need_system
  if [[ -e $arm/root/complete ]]; then return; fi
  say "unpack arm64 libraries of the tests"
  local codename archive root=$PWD/$arm
  codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
  archive=$(debian_archive)
  [[ -n $archive ]] || die "missing: an archive of Debian $codename to take arm64 libraries from"
  mkdir -p "$root"/{root,lists/partial,cache/archives/partial,packages} build/log
  for suite in "$codename" "$codename-backports"; do
    echo "deb [arch=arm64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive $suite main"
  done >"$root/sources.list"
  local options=(-o "Dir::State::lists=$root/lists" -o "Dir::Cache=$root/cache" -o "Dir::Etc::sourcelist=$root/sources.list"
                 -o Dir::Etc::sourceparts=- -o APT::Architectures::=arm64)
  apt_quiet "${options[@]}" update
  (cd "$root/packages" && apt-get -q "${options[@]}" download libcjson1:arm64 libcjson-dev:arm64 "libcatch2-dev:arm64/$codename-backports") \
    >build/log/apt.log 2>&1 || { tail -n 20 build/log/apt.log >&2; die "arm64 libraries cannot be had"; }
  for package in "$root"/packages/*.deb; do dpkg-deb -x "$package" "$root/root"; done
  touch "$root/root/complete"
}

# The tests of what depends on the processor, besides unit_cpu_attend, which runs on every level.
arm_tests=(unit_loops unit_entry unit_fp unit_codec_numerics unit_codec_rotation unit_cpu_pages unit_policy_statistics)

build_arm() {
  need_arm
  logged configure-aarch64 cmake -G Ninja -B "$arm/tree" -D CMAKE_BUILD_TYPE=Release -D CMAKE_TOOLCHAIN_FILE=cmake/aarch64.cmake \
    -D "KVQ_ARM_ROOT=$PWD/$arm/root" -D KVQ_BUILD_EXAMPLES=OFF
  say "compile $arm/tree"
  logged build-aarch64 cmake --build "$arm/tree" -j "$jobs" --target kvq kvq-conform unit_cpu_attend "${arm_tests[@]}"
}

arm_run() { qemu-aarch64 -L /usr/aarch64-linux-gnu "$@"; }
arm_conform() { arm_run "$arm/tree/conformance/runner/kvq-conform" --lib "$arm/tree/libkvq.so.1" --vectors conformance/vectors | tail -n 1; }
arm_test() {
  printf '%-24s' "$1"
  arm_run "$arm/tree/tests/unit/$1" | grep -E '^(All tests passed|test cases)' || die "$1 failed on aarch64"
}
