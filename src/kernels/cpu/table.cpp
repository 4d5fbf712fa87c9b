#include "kernels/cpu/table.h"

#include "kernels/cpu/balance.h"

namespace sinkhorn::cpu::SINKHORN_ISA {
namespace {

// Columns that look only upwards need their own sweep; with no iterations no columns are balanced.
bool sweeps(const BalanceParams& p) {
  return p.iterations > 0 && (p.columns == Columns::kPrefix || p.columns == Columns::kPrior);
}

template <class T>
void run_balance_fwd(const BalanceParams& p, const Executor& executor) {
  sweeps(p) ? balance_causal_fwd<T>(p, executor) : balance_full_fwd<T>(p, executor);
}
template <class T>
void run_balance_bwd(const BalanceParams& p, const Executor& executor) {
  sweeps(p) ? balance_causal_bwd<T>(p, executor) : balance_full_bwd<T>(p, executor);
}

}  // namespace

void balance_fwd(const BalanceParams& p, const Executor& executor) {
  p.compute64 ? run_balance_fwd<double>(p, executor) : run_balance_fwd<float>(p, executor);
}
void balance_bwd(const BalanceParams& p, const Executor& executor) {
  p.compute64 ? run_balance_bwd<double>(p, executor) : run_balance_bwd<float>(p, executor);
}

const KernelTable& table() {
  static constexpr KernelTable kTable = {pool_fwd,      pool_bwd,      balance_fwd, balance_bwd,
                                         attention_fwd, attention_bwd, sortcut_fwd, sortcut_bwd};
  return kTable;
}

}  // namespace sinkhorn::cpu::SINKHORN_ISA
