// The entry points of one instruction set; SINKHORN_ISA is set in kernel files alone.
#pragma once

#include "kernels/common/executor.h"
#include "kernels/common/params.h"

namespace sinkhorn::cpu {

struct KernelTable {
  void (*pool_fwd)(const PoolParams&, const Executor&);
  void (*pool_bwd)(const PoolParams&, const Executor&);
  void (*balance_fwd)(const BalanceParams&, const Executor&);
  void (*balance_bwd)(const BalanceParams&, const Executor&);
  void (*attention_fwd)(const AttentionParams&, const Executor&);
  void (*attention_bwd)(const AttentionParams&, const Executor&);
  void (*sortcut_fwd)(const AttentionParams&, const Executor&);
  void (*sortcut_bwd)(const AttentionParams&, const Executor&);
};

#ifdef SINKHORN_ISA
namespace SINKHORN_ISA {

void pool_fwd(const PoolParams& p, const Executor& executor);
void pool_bwd(const PoolParams& p, const Executor& executor);
void balance_fwd(const BalanceParams& p, const Executor& executor);
void balance_bwd(const BalanceParams& p, const Executor& executor);
void attention_fwd(const AttentionParams& p, const Executor& executor);
void attention_bwd(const AttentionParams& p, const Executor& executor);
void sortcut_fwd(const AttentionParams& p, const Executor& executor);
void sortcut_bwd(const AttentionParams& p, const Executor& executor);

const KernelTable& table();

}  // namespace SINKHORN_ISA
#endif
}  // namespace sinkhorn::cpu
