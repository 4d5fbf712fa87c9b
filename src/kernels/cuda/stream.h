// A CUDA stream by its plain name, so that host code needs no CUDA header.
#pragma once

struct CUstream_st;

namespace sinkhorn::cuda {

using Stream = CUstream_st*;

}  // namespace sinkhorn::cuda
