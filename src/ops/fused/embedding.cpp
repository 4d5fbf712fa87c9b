// embed: the vectors of tokens, beside the table that they come from.
//
// A tied output projection reads the table, too. Left to autograd, the tokens' gradient becomes a
// table full of zeros and is then added to the projection's. Here the projection reads the table
// that comes back, so that both gradients arrive in one place, and the tokens' rows are added to
// the projection's where it lies.
//
// Backward reads the tokens in the order of their ids, which is known before forward begins: where
// there is side work (side_work.h), they are sorted then, aside.
#include "kernels/cuda/embedding.h"

#include <ATen/ops/add.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "ops/autograd.h"
#include "ops/fused/fused.h"
#include "ops/fused/side_work.h"
#include "ops/fused/targets.h"

namespace sinkhorn::ops {
namespace {

void check_embed(const Tensor& weight, const Tensor& ids, const Tensor& positions) {
  const std::string_view op = "embed";
  check_float(op, "weight", weight);
  check_rank(op, "weight", weight, 2);
  check_rank(op, "ids", ids, 2);
  check_device(op, weight, "ids", ids);
  check_device(op, weight, "positions", positions);
  check_sizes(op, "positions", positions, {ids.sym_size(1), weight.sym_size(1)}, "[L, E]");
  check_int64(op, "ids", ids);
}

// Whether the kernels serve a table [V, E] and tokens with it: all float32 on a GPU.
bool kernel_covers(const Tensor& table, const Tensor& other, const Tensor& ids) {
  if (!table.is_cuda() || table.scalar_type() != at::kFloat || other.scalar_type() != at::kFloat) {
    return false;
  }
  const auto tokens = ids.sym_numel().maybe_as_int(), rows = table.sym_size(0).maybe_as_int();
  const auto width = table.sym_size(1).maybe_as_int();
  return tokens.has_value() && rows.has_value() && width.has_value() &&
         cuda::covers_embed(*tokens, *rows, *width);
}

// positions [L, E] + scale weight[ids]: [B, L, E]
Tensor embed_fwd(const Tensor& weight, const Tensor& ids, const Tensor& positions, double scale) {
  check_embed(weight, ids, positions);
  if (!kernel_covers(weight, positions, ids)) {
    return at::add(positions, at::embedding(weight, ids), scale);
  }
  const c10::DeviceGuard guard(weight.device());
  const Tensor table = aligned(weight), places = aligned(positions), tokens = ids.contiguous();
  const Tensor out = at::empty({ids.size(0), ids.size(1), weight.size(1)}, weight.options());
  cuda::EmbedParams p;
  p.tokens = ids.numel();
  p.length = ids.size(1);
  p.rows = weight.size(0);
  p.width = weight.size(1);
  p.scale = static_cast<float>(scale);
  p.ids = tokens.const_data_ptr<int64_t>();
  p.table = table.const_data_ptr<float>();
  p.positions = places.const_data_ptr<float>();
  p.out = out.data_ptr<float>();
  cuda::launch_embed_fwd(p, current_stream(weight));
  return out;
}

// The sums of scale * grad[t] over the tokens of each id: [rows, E]
Tensor sum_rows(const Tensor& grad, const Tensor& ids, int64_t rows, double scale) {
  return at::embedding_dense_backward(grad * scale, ids, rows, /*padding_idx=*/-1,
                                      /*scale_grad_by_freq=*/false);
}

// The ids in ascending order, int16 or int32, and the token that each is of, int64.
using SortedIds = std::tuple<Tensor, Tensor>;

// By the kernel, which must cover them; on the stream of `side` if there is one.
SortedIds sort_by_kernel(const Tensor& flat, int64_t rows, SideWork* side) {
  const Tensor sorted = at::empty(flat.sizes(), flat.options().dtype(at::kInt));
  const Tensor order = at::empty(flat.sizes(), flat.options());
  const auto sort = [&] {
    cuda::launch_embed_sort({flat.numel(), rows, flat.const_data_ptr<int64_t>(),
                             sorted.data_ptr<int32_t>(), order.data_ptr<int64_t>()},
                            current_stream(flat));
  };
  run_aside(side, {flat, sorted, order}, sort);
  return {sorted, order};
}

SortedIds sorted_ids(const Tensor& ids, int64_t rows) {
  const Tensor flat = ids.flatten().contiguous();
  if (cuda::covers_embed_sort(flat.numel(), rows)) return sort_by_kernel(flat, rows, nullptr);
  // A radix sort makes a pass for each byte of a key. Ids that are not in the table must not become
  // others that are.
  const bool narrow = rows < int64_t{1} << 15;
  const Tensor keys = flat.clamp(-1, rows).to(narrow ? at::kShort : at::kInt);
  return at::sort(keys, /*stable=*/true, 0, false);
}

void add_tokens(Tensor& onto, const Tensor& grad, const SortedIds& ids, double scale) {
  const auto& [sorted, order] = ids;
  TORCH_CHECK_VALUE(is_plain(onto), "embed_bwd: onto must be contiguous and aligned to 16 bytes");
  const Tensor plain_grad = aligned(grad);
  const Tensor partial =
      at::empty({cuda::embed_partials(sorted.numel()), onto.size(1)}, onto.options());
  cuda::EmbedGradient p;
  p.tokens = sorted.numel();
  p.rows = onto.size(0);
  p.width = onto.size(1);
  p.scale = static_cast<float>(scale);
  p.narrow = sorted.scalar_type() == at::kShort;
  p.ids = sorted.const_data_ptr();
  p.order = order.const_data_ptr<int64_t>();
  p.grad = plain_grad.const_data_ptr<float>();
  p.partial = partial.data_ptr<float>();
  p.table = onto.data_ptr<float>();
  cuda::launch_embed_bwd(p, current_stream(onto));
}

// onto[ids[t]] += scale * grad[t], in place.
void embed_bwd(Tensor& onto, const Tensor& grad, const Tensor& ids, double scale) {
  check_rank("embed_bwd", "onto", onto, 2);
  check_rank("embed_bwd", "ids", ids, 2);
  check_sizes("embed_bwd", "grad", grad, {ids.sym_size(0), ids.sym_size(1), onto.sym_size(1)},
              "[B, L, E]");
  if (!kernel_covers(onto, grad, ids)) {
    onto.add_(sum_rows(grad, ids, onto.size(0), scale));
    return;
  }
  const c10::DeviceGuard guard(onto.device());
  add_tokens(onto, grad, sorted_ids(ids, onto.size(0)), scale);
}

// A gradient that may be written: `grad` itself where its only holder has handed it over, else a
// copy. What is expanded or transposed is copied, too.
Tensor writable(const Tensor& grad) {
  const bool owned = !at::GradMode::is_enabled() && grad.use_count() == 1 && grad.has_storage() &&
                     grad.storage().use_count() == 1 && is_plain(grad);
  return owned ? grad : grad.clone(at::MemoryFormat::Contiguous);
}

// The gradient that came back for the table and what side work has left for it, to be written on;
// undefined where there is neither.
Tensor table_gradient(const Tensor& table, const Tensor& left) {
  if (!left.defined()) return table.defined() ? writable(table) : Tensor();
  return table.defined() ? left.add_(table) : left;
}

class EmbedFunction : public torch::autograd::Function<EmbedFunction> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& weight, const Tensor& ids,
                               const Tensor& positions, double scale) {
    static const auto op = find_op<decltype(embed_fwd)>("embed_fwd");
    at::AutoDispatchBelowAutograd below;
    context->set_materialize_grads(false);
    context->save_for_backward({ids});
    context->saved_data["scale"] = scale;
    context->saved_data["rows"] = weight.size(0);
    if (const SideWorkPtr side = SideScope::current(); side && side->accepts(weight)) {
      context->saved_data["side"] = c10::IValue::make_capsule(side);
      context->saved_data["memory"] = reinterpret_cast<int64_t>(weight.const_data_ptr());
      sort_aside(context->saved_data, *side, weight, ids, positions);
    }
    return {weight, op.call(weight, ids, positions, scale)};
  }
  // By reference: a copy of the list would be a second holder of the table's gradient.
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = find_op<decltype(embed_bwd)>("embed_bwd");
    Tensor sum = table_gradient(grads[0], left_aside(context->saved_data));
    const Tensor& tokens = grads[1];
    if (!tokens.defined()) return {sum, Tensor(), Tensor(), Tensor()};
    const Tensor ids = context->get_saved_variables()[0];
    const int64_t rows = context->saved_data["rows"].toInt();
    const double scale = context->saved_data["scale"].toDouble();
    if (!sum.defined() && !tokens.is_cuda()) {
      return {sum_rows(tokens, ids, rows, scale), Tensor(), Tensor(), Tensor()};
    }
    if (!sum.defined()) sum = at::zeros({rows, tokens.size(-1)}, tokens.options());
    if (context->saved_data.count("sorted") > 0 && kernel_covers(sum, tokens, ids)) {
      add_tokens(sum, tokens, sorted_aside(context->saved_data), scale);
    } else {
      op.call(sum, tokens, ids, scale);
    }
    return {sum, Tensor(), Tensor(), Tensor()};
  }

 private:
  static Tensor left_aside(SavedData& data) {
    if (data.count("side") == 0) return {};
    const auto held = data["side"].toCapsule();
    return static_cast<SideWork&>(*held).take(
        reinterpret_cast<const void*>(data["memory"].toInt()));
  }
  static void sort_aside(SavedData& data, SideWork& side, const Tensor& weight, const Tensor& ids,
                         const Tensor& positions) {
    const int64_t rows = weight.size(0);
    if (!kernel_covers(weight, positions, ids) || !cuda::covers_embed_sort(ids.numel(), rows)) {
      return;
    }
    const c10::DeviceGuard guard(weight.device());
    const auto [sorted, order] = sort_by_kernel(ids.flatten().contiguous(), rows, &side);
    data["sorted"] = c10::List<Tensor>({sorted, order});
  }
  static SortedIds sorted_aside(SavedData& data) {
    const auto held = data["side"].toCapsule();
    static_cast<SideWork&>(*held).meet();
    const c10::List<Tensor> both = data["sorted"].toTensorList();
    return {both.get(0), both.get(1)};
  }
};

std::tuple<Tensor, Tensor> embed_op(const Tensor& weight, const Tensor& ids,
                                    const Tensor& positions, double scale) {
  static const auto op = find_op<decltype(embed_fwd)>("embed_fwd");
  check_embed(weight, ids, positions);
  if (!torch::autograd::compute_requires_grad(weight)) {
    return {weight, op.call(weight, ids, positions, scale)};
  }
  const variable_list both = EmbedFunction::apply(weight, ids, positions, scale);
  if (const SideWorkPtr side = SideScope::current()) side->promise_to_take(both[0]);
  return {both[0], both[1]};
}

}  // namespace

Embedded embed(const Tensor& weight, const Tensor& ids, const Tensor& positions, double scale) {
  static const auto op = find_op<decltype(embed_op)>("embed");
  auto [table, tokens] = op.call(weight, ids, positions, scale);
  return {table, tokens};
}

TORCH_LIBRARY_IMPL(sinkhorn, CompositeImplicitAutograd, m) { m.impl("embed", embed_op); }
TORCH_LIBRARY_IMPL(sinkhorn, Autograd, m) {
  m.impl("embed_fwd", no_second_derivative());
  m.impl("embed_bwd", no_second_derivative());
}
// ATen's operations where no kernel serves: for every device, and for Meta.
TORCH_LIBRARY_IMPL(sinkhorn, CompositeExplicitAutograd, m) {
  m.impl("embed_fwd", embed_fwd);
  m.impl("embed_bwd", embed_bwd);
}

}  // namespace sinkhorn::ops
