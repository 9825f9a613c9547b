// What every benchmark of the C ABI needs: structs with their size, calls that throw, and medians.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kvq/kvq.h"

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

inline void check(int32_t status) {
  if (status == KVQ_OK) return;
  char detail[512] = "";
  kvq_error_detail(detail, sizeof detail, nullptr);
  throw std::runtime_error(std::string(kvq_status_string(status)) + ": " + detail);
}

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + ptrdiff_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}
