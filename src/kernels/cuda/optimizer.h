// What the CUDA kernels between backward and the next forward pass are told, and their launchers.
// Each works on all tensors of a model, however many they are. All tensors contiguous, aligned to
// 16 bytes and float32 unless said; the lists lie in host memory, everything else on the device.
#pragma once

#include <cstdint>

#include "kernels/common/params.h"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

bool covers_updates();  // whether this build has these kernels

struct Gradient {
  const float* data;
  int64_t size;
};

// What is known of a run so far.
struct StepRecord {
  int64_t steps;             // done
  int64_t failed_step;       // the first whose loss or gradients were not finite; 0: none
  int64_t failed_parameter;  // the first of its gradients that was not; -1: the loss was not; -2:
                             // the norm of all gradients, each of which is finite
  int64_t arrived;           // the kernel's own; 0 between launches
};

struct NoteParams {
  const Gradient* gradients = nullptr;
  int count = 0;
  const float* loss = nullptr;
  float clip = 0.0f;             // the largest norm that is let through; 0: any
  StepRecord* record = nullptr;  // a step is added to it
  float* sums = nullptr;         // [2]: the loss and the norm are added to them
  // Of the gradients: 1, or more where their norm is too large; not a number from the first step on
  // that failed.
  float* divisor = nullptr;
  void* scratch = nullptr;  // of note_scratch bytes
};

int64_t note_scratch(const NoteParams& p);
void launch_note_gradients(const NoteParams& p, Stream stream);

struct AdamTensor {
  float* parameter;
  const float* gradient;
  float *exp_avg, *exp_avg_sq;
  float* step;  // [1]: steps done, one is added
  int64_t size;
  float decay;
};

struct AdamParams {
  const AdamTensor* tensors = nullptr;
  int count = 0;
  const float* rate = nullptr;     // [1]
  const float* divisor = nullptr;  // [1], of the gradients; null: 1; not a number: nothing is done
  float beta1 = 0.0f, beta2 = 0.0f, epsilon = 0.0f;
  unsigned* arrived = nullptr;  // [1]: the kernel's own; 0 between launches
};

void launch_adam(const AdamParams& p, Stream stream);

struct Copy {
  const float* from;
  void* to;  // [size] of the copies' type
  int64_t size;
};

// type: bfloat16 or float16
void launch_copies(const Copy* copies, int count, Type type, Stream stream);

}  // namespace sinkhorn::cuda
