#include "cuda/attend_fast.h"

#include <cuda_fp16.h>

#include "cuda/fused_kernel.cuh"

namespace kvq::cuda {

namespace {

using Launch = cudaError_t (*)(const AttendArguments &, const LayerLaunch &, uint32_t, cudaStream_t);

// The kernels that are built: keys x values.  What is not here goes the general way.
struct Built {
  KeyPath keys;
  ValuePath values;
  Launch launch;
};
constexpr Built kBuilt[] = {
    {KeyPath::book2, ValuePath::book2, launch_fused<BookKeys<2>, RowValues<2, false>>},
    {KeyPath::book3, ValuePath::book3, launch_fused<BookKeys<3>, RowValues<3, false>>},
    {KeyPath::book4, ValuePath::book4, launch_fused<BookKeys<4>, RowValues<4, false>>},
    {KeyPath::columns_2, ValuePath::affine2, launch_fused<ColumnKeys<0x22222222>, RowValues<2, true>>},
    {KeyPath::columns_13, ValuePath::affine2, launch_fused<ColumnKeys<0x33331111>, RowValues<2, true>>},
    {KeyPath::columns, ValuePath::affine2, launch_fused<ColumnKeys<0>, RowValues<2, true>>},
    {KeyPath::columns, ValuePath::book2, launch_fused<ColumnKeys<0>, RowValues<2, false>>},
};

const Built *find(const LayerLaunch &launch) {
  for (const Built &built : kBuilt)
    if (built.keys == launch.keys && built.values == launch.values) return &built;
  return nullptr;
}

}  // namespace

bool has_fused(KeyPath keys, ValuePath values) {
  LayerLaunch launch;
  launch.keys = keys, launch.values = values;
  return find(launch) != nullptr;
}

cudaError_t launch_attention(const AttendArguments &arguments, const LayerLaunch &launch, uint32_t processors, cudaStream_t stream) {
  if (const Built *built = find(launch)) return built->launch(arguments, launch, processors, stream);
  return attend_general(arguments, processors, stream);
}

}  // namespace kvq::cuda
