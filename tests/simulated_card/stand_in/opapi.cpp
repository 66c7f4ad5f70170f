// Stands for CANN's libopapi.so: the aclnn* operators that torch_npu calls, each computed by ATen's CPU
// kernel on the memory that stands for the card's, with the card's rounding rules around it.
//
// The parameters are those of torch_npu's calls. They are looked up by name, so unlike ACL's their types
// are not checked by the compiler. An operator that is missing here falls to the aclop path, which says its
// name and ends the process; most are one line.
//
// What is known of the cards' arithmetic, and is computed here:
//   910A, 310P  FP16 results saturate at +-65504 and NaN becomes 0; the matrix unit takes FP16 operands only:
//               FP32 ones are refused (KEEP_DTYPE) or cast.
//   910B        FP16 overflows to infinity; the matrix unit takes FP16, BF16, FP32, and FP32 shortened to
//               HF32's 11 bits.
// Everything 16 bits wide is computed in FP32 and rounded once. How a card's own kernels round, nobody knows
// from here.
#include <ATen/ATen.h>
#include <acl/acl_base.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

void fakeacl_record(std::function<int()>);

extern "C" {
int fakeacl_capturing();
int fakeacl_check_fault(const char*);
void fakeacl_set_message(const char*);
const char* aclrtGetSocName();
}

// ---- What torch_npu makes of its arguments before it calls an operator ----

struct aclTensor { at::Tensor t; };
struct aclScalar { at::Scalar s; };
struct aclIntArray { std::vector<int64_t> v; };
struct aclBoolArray { std::vector<bool> v; };
struct aclFloatArray { std::vector<float> v; };
struct aclTensorList { std::vector<const aclTensor*> v; };

// A call that is ready to run: an operator is first asked for its workspace, then executed.
struct aclOpExecutor {
  const char* name;
  std::function<void()> compute;
};

using Workspace = uint64_t*;
using Executor = aclOpExecutor**;

namespace {

// CANN's codes: a parameter that the operator does not take, and a fault inside a kernel.
constexpr int kInvalidParameter = 161002;
constexpr int kInnerError = 561103;

// How FP32 operands enter the matrix unit (torch_npu's cubeMathType).
enum MathType : int8_t { kKeepDtype = 0, kAllowDownPrecision = 1, kUseFp16 = 2, kUseHf32 = 3 };

at::ScalarType dtype_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_BOOL: return at::kBool;
    default: throw std::runtime_error("a dtype that the stand-in does not know");
  }
}

// A 910B with a digit behind it (one without is an old 910), or an A3, whose arithmetic is the same.
bool is_910b() {
  static const bool found =
      (strncmp(aclrtGetSocName(), "Ascend910B", 10) == 0 && strlen(aclrtGetSocName()) > 10) ||
      strncmp(aclrtGetSocName(), "Ascend910_93", 12) == 0;
  return found;
}

bool is_narrow(const at::Tensor& x) { return x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16; }

// An argument as it is, as an optional, and both widened where it is 16 bits wide.
at::Tensor raw(const aclTensor* x) { return x ? x->t : at::Tensor(); }
c10::optional<at::Tensor> maybe(const aclTensor* x) {
  return x && x->t.defined() ? c10::optional<at::Tensor>(x->t) : c10::nullopt;
}
at::Tensor widened(const at::Tensor& x) { return is_narrow(x) ? x.to(at::kFloat) : x; }
at::Tensor wide(const aclTensor* x) { return x && x->t.defined() ? widened(x->t) : at::Tensor(); }
c10::optional<at::Tensor> maybe_wide(const aclTensor* x) {
  return x && x->t.defined() ? c10::optional<at::Tensor>(widened(x->t)) : c10::nullopt;
}

at::Tensor saturated(const at::Tensor& x) {
  return at::nan_to_num(x.to(at::kFloat), 0.0, 65504.0, -65504.0).clamp(-65504.0, 65504.0);
}

// A result goes to its place: rounded to the place's dtype, saturated by a card that has no infinities.
void put(const aclTensor* out, const at::Tensor& result) {
  if (!out || !out->t.defined()) return;
  const bool saturates = !is_910b() && out->t.scalar_type() == at::kHalf && result.is_floating_point();
  out->t.copy_((saturates ? saturated(result) : result).reshape(out->t.sizes()));
}

// An operand as it enters the matrix unit, in FP32.
at::Tensor cube(const aclTensor* operand, int8_t math) {
  const at::Tensor x = wide(operand);
  static const bool trace = getenv("FAKE_TRACE") != nullptr;
  if (trace) {
    const char* dtype = c10::toString(raw(operand).scalar_type());
    fprintf(stderr, "[simulated card] operand %s, cubeMathType %d\n", dtype, math);
  }
  if (raw(operand).scalar_type() != at::kFloat || math == kKeepDtype) return x;
  if (!is_910b()) return saturated(x).to(at::kHalf).to(at::kFloat);
  if (math == kUseFp16) return x.to(at::kHalf).to(at::kFloat);
  const auto bits = x.contiguous().view(at::kInt);
  return at::bitwise_and(bits + 0x800, ~0xFFF).view(at::kFloat);
}

// Whether the matrix unit takes these operands at all; the sentence is the real kernels'.
int refused(std::initializer_list<const aclTensor*> operands, int8_t math) {
  if (is_910b()) return 0;
  for (const auto* operand : operands) {
    const auto dtype = raw(operand).scalar_type();
    if (dtype == at::kBFloat16 || (dtype == at::kFloat && (math == kKeepDtype || math == kUseHf32))) {
      fakeacl_set_message(
          "EZ1001: The soc version does not support bf16 / fp32 for calculations, "
          "please change the setting of cubeMathType.");
      return kInvalidParameter;
    }
  }
  return 0;
}

int computed(const char* name, const std::function<void()>& compute) {
  if (const int fault = fakeacl_check_fault(name)) return fault;
  try {
    c10::InferenceMode guard;
    compute();
    return 0;
  } catch (std::exception& error) {
    fprintf(stderr, "[simulated card] %s: %s\n", name, error.what());
    return kInnerError;
  }
}

int execute(aclOpExecutor* executor) {
  const aclOpExecutor call = *executor;
  delete executor;
  if (!fakeacl_capturing()) return computed(call.name, call.compute);
  fakeacl_record([call] { return computed(call.name, call.compute); });
  return 0;
}

// What a graph keeps must live as long as it does.
template <class T>
int destroy(const T* argument) {
  if (!fakeacl_capturing()) delete argument;
  return 0;
}

}  // namespace

extern "C" {

// `strides` and `offset` count elements of `memory`. torch_npu passes no memory for an absent tensor.
aclTensor* aclCreateTensor(
    const int64_t* sizes, uint64_t rank, aclDataType type, const int64_t* strides, int64_t offset, aclFormat,
    const int64_t*, uint64_t, void* memory) {
  const auto dtype = dtype_of(type);
  if (!memory) return new aclTensor{rank == 1 && sizes[0] == 0 ? at::empty({0}, dtype) : at::Tensor()};
  char* start = static_cast<char*>(memory) + offset * c10::elementSize(dtype);
  return new aclTensor{at::from_blob(
      start, at::IntArrayRef(sizes, rank), at::IntArrayRef(strides, rank), at::TensorOptions().dtype(dtype))};
}

// What torch_npu asks after an operator that decides the shape of its result.
int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* rank) {
  const auto found = tensor->t.sizes();
  *rank = found.size();
  *sizes = new int64_t[found.size()];
  std::copy(found.begin(), found.end(), *sizes);
  return 0;
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  switch (dtype_of(type)) {
    case at::kFloat: return new aclScalar{*static_cast<float*>(value)};
    case at::kHalf: return new aclScalar{static_cast<float>(*static_cast<at::Half*>(value))};
    case at::kLong: return new aclScalar{*static_cast<int64_t*>(value)};
    case at::kInt: return new aclScalar{*static_cast<int*>(value)};
    case at::kBool: return new aclScalar{*static_cast<bool*>(value)};
    default: return new aclScalar{*static_cast<double*>(value)};
  }
}

aclIntArray* aclCreateIntArray(const int64_t* v, uint64_t n) { return new aclIntArray{{v, v + n}}; }
aclBoolArray* aclCreateBoolArray(const bool* v, uint64_t n) { return new aclBoolArray{{v, v + n}}; }
aclFloatArray* aclCreateFloatArray(const float* v, uint64_t n) { return new aclFloatArray{{v, v + n}}; }
aclTensorList* aclCreateTensorList(const aclTensor* const* v, uint64_t n) { return new aclTensorList{{v, v + n}}; }
int aclDestroyTensor(const aclTensor* p) { return destroy(p); }
int aclDestroyScalar(const aclScalar* p) { return destroy(p); }
int aclDestroyIntArray(const aclIntArray* p) { return destroy(p); }
int aclDestroyBoolArray(const aclBoolArray* p) { return destroy(p); }
int aclDestroyFloatArray(const aclFloatArray* p) { return destroy(p); }

int aclDestroyTensorList(const aclTensorList* list) {
  if (!list || fakeacl_capturing()) return 0;
  for (const auto* tensor : list->v) delete tensor;
  return destroy(list);
}

}  // extern "C"

// ---- Operators ----

#define P(...) __VA_ARGS__
// CHECKED takes an expression that is the code of a refusal, or 0; OP refuses nothing.
#define CHECKED(NAME, PARAMETERS, REFUSED, ...)                                           \
  extern "C" int NAME##GetWorkspaceSize(PARAMETERS, Workspace bytes, Executor executor) { \
    if (const int code = REFUSED) return code;                                            \
    *bytes = 0;                                                                           \
    *executor = new aclOpExecutor{#NAME, [=] { __VA_ARGS__; }};                           \
    return 0;                                                                             \
  }                                                                                       \
  extern "C" int NAME(void*, uint64_t, aclOpExecutor* executor, void*) { return execute(executor); }
#define OP(NAME, PARAMETERS, ...) CHECKED(NAME, P(PARAMETERS), 0, __VA_ARGS__)
// Of one tensor, of two, and of a tensor and a scalar; `x`, `y` and `s` are their names.
#define UNARY(NAME, RESULT) \
  OP(NAME, P(aclTensor* a, aclTensor* out), { const auto x = wide(a); put(out, RESULT); })
#define BINARY(NAME, RESULT)                                \
  OP(NAME, P(aclTensor* a, aclTensor* b, aclTensor* out), { \
    const auto x = wide(a), y = wide(b);                    \
    put(out, RESULT);                                       \
  })
#define SCALAR(NAME, RESULT)                                \
  OP(NAME, P(aclTensor* a, aclScalar* b, aclTensor* out), { \
    const auto x = wide(a);                                 \
    const auto s = b->s;                                    \
    put(out, RESULT);                                       \
  })

// Moving and making.
OP(aclnnInplaceCopy, P(aclTensor* to, aclTensor* from), put(to, raw(from).expand_as(raw(to))))
OP(aclnnCast, P(aclTensor* x, aclDataType, aclTensor* out), put(out, raw(x)))
OP(aclnnInplaceZero, P(aclTensor* x), raw(x).zero_())
OP(aclnnInplaceOne, P(aclTensor* x), raw(x).fill_(1))
OP(aclnnInplaceFillScalar, P(aclTensor* x, aclScalar* s), put(x, at::full_like(wide(x), s->s)))
OP(aclnnArange, P(aclScalar* a, aclScalar* b, aclScalar* step, aclTensor* out),
   put(out, at::arange(a->s, b->s, step->s, raw(out).options())))
OP(aclnnCat, P(aclTensorList* list, int64_t dim, aclTensor* out), {
  std::vector<at::Tensor> parts;
  for (const auto* part : list->v) parts.push_back(part->t);
  put(out, at::cat(parts, dim));
})
OP(aclnnIndexSelect, P(aclTensor* x, int64_t dim, aclTensor* index, aclTensor* out),
   put(out, at::index_select(raw(x), dim, raw(index))))
OP(aclnnGather, P(aclTensor* x, int64_t dim, aclTensor* index, aclTensor* out),
   put(out, at::gather(raw(x), dim, raw(index).to(at::kLong))))
OP(aclnnEmbedding, P(aclTensor* weight, aclTensor* ids, aclTensor* out),
   put(out, at::embedding(raw(weight), raw(ids).to(at::kLong))))
OP(aclnnIndex, P(aclTensor* x, aclTensorList* list, aclTensor* out), {
  c10::List<c10::optional<at::Tensor>> indices;
  // A dimension that is taken whole has an empty tensor.
  for (const auto* index : list->v) {
    indices.push_back(index->t.numel() ? c10::optional<at::Tensor>(index->t) : c10::nullopt);
  }
  put(out, at::index(raw(x), indices));
})
// One row for each dimension. The result has room for as many as there can be.
OP(aclnnNonzeroV2, P(aclTensor* x, aclTensor* out), {
  const auto found = at::nonzero(raw(x)).t();
  out->t = out->t.flatten().narrow(0, 0, found.numel()).view(found.sizes());
  put(out, found);
})
OP(aclnnRepeat, P(aclTensor* x, aclIntArray* times, aclTensor* out), put(out, raw(x).repeat(times->v)))
OP(aclnnConstantPadNd, P(aclTensor* x, aclIntArray* pad, aclScalar* s, aclTensor* out),
   put(out, at::constant_pad_nd(raw(x), pad->v, s->s)))

// The matrix unit.
CHECKED(aclnnMm, P(aclTensor* a, aclTensor* b, aclTensor* out, int8_t math),
        refused({a, b}, math),
        put(out, at::mm(cube(a, math), cube(b, math))))
CHECKED(aclnnMatmul, P(aclTensor* a, aclTensor* b, aclTensor* out, int8_t math),
        refused({a, b}, math),
        put(out, at::matmul(cube(a, math), cube(b, math))))
CHECKED(aclnnBatchMatMul, P(aclTensor* a, aclTensor* b, aclTensor* out, int8_t math),
        refused({a, b}, math),
        put(out, at::bmm(cube(a, math), cube(b, math))))
CHECKED(aclnnAddmm,
        P(aclTensor* c, aclTensor* a, aclTensor* b, aclScalar* beta, aclScalar* alpha, aclTensor* out, int8_t math),
        refused({a, b}, math),
        put(out, at::addmm(wide(c), cube(a, math), cube(b, math), beta->s, alpha->s)))
CHECKED(aclnnBaddbmm,
        P(aclTensor* c, aclTensor* a, aclTensor* b, aclScalar* beta, aclScalar* alpha, aclTensor* out, int8_t math),
        refused({a, b}, math),
        put(out, at::baddbmm(wide(c), cube(a, math), cube(b, math), beta->s, alpha->s)))
CHECKED(aclnnConvolution,
        P(aclTensor* x, aclTensor* weight, aclTensor* bias, aclIntArray* stride, aclIntArray* padding,
          aclIntArray* dilation, bool transposed, aclIntArray* output_padding, int64_t groups, aclTensor* out,
          int8_t math),
        refused({x, weight}, math),
        put(out, at::convolution(
            cube(x, math), cube(weight, math), maybe_wide(bias), stride->v, padding->v, dilation->v, transposed,
            output_padding->v, groups)))
CHECKED(aclnnFlashAttentionScore,
        P(aclTensor* query, aclTensor* key, aclTensor* value, aclTensor*, aclTensor*, aclTensor*, aclTensor* mask,
          aclIntArray*, double scale, double, int64_t, int64_t, int64_t, char* layout, int64_t,
          int64_t sparse_mode, aclTensor*, aclTensor*, aclTensor*, aclTensor* out),
        strcmp(layout, "BNSD") || (sparse_mode != 0 && sparse_mode != 2) ? kInvalidParameter
                                                                         : refused({query}, kKeepDtype),
        {
          // No cubeMathType is passed, so what a card makes of FP32 is its own business; here it keeps to it.
          // The kernel's mask is true where nothing is attended to, ATen's where something is.
          c10::optional<at::Tensor> attend;
          const bool masked = sparse_mode == 0 && mask && raw(mask).defined() && raw(mask).numel();
          if (masked) attend = at::logical_not(raw(mask).to(at::kBool));
          const bool causal = sparse_mode == 2;
          put(out, at::scaled_dot_product_attention(
              wide(query), wide(key), wide(value), attend, 0.0, causal, scale));
        })

// Normalisation, pooling, reduction.
OP(aclnnBatchNorm,
   P(aclTensor* x, aclTensor* weight, aclTensor* bias, aclTensor* mean, aclTensor* variance, bool training,
     double momentum, double eps, aclTensor* out, aclTensor*, aclTensor*),
   put(out, at::batch_norm(
       wide(x), maybe_wide(weight), maybe_wide(bias), maybe_wide(mean), maybe_wide(variance), training, momentum,
       eps, false)))
OP(aclnnLayerNorm,
   P(aclTensor* x, aclIntArray* shape, aclTensor* weight, aclTensor* bias, double eps, aclTensor* out, aclTensor*,
     aclTensor*),
   put(out, at::layer_norm(wide(x), shape->v, maybe_wide(weight), maybe_wide(bias), eps)))
OP(aclnnSoftmax, P(aclTensor* x, int64_t dim, aclTensor* out), put(out, at::softmax(wide(x), dim)))
OP(aclnnLogSoftmax, P(aclTensor* x, int64_t dim, aclTensor* out), put(out, at::log_softmax(wide(x), dim)))
OP(aclnnMaxPool2dWithMask,
   P(aclTensor* x, aclIntArray* kernel, aclIntArray* stride, aclIntArray* padding, aclIntArray* dilation,
     bool ceil, aclTensor* out, aclTensor*),
   put(out, at::max_pool2d(raw(x), kernel->v, stride->v, padding->v, dilation->v, ceil)))
OP(aclnnAdaptiveAvgPool2d, P(aclTensor* x, aclIntArray* size, aclTensor* out),
   put(out, at::_adaptive_avg_pool2d(wide(x), size->v)))
OP(aclnnMean, P(aclTensor* x, aclIntArray* dims, bool keep, aclDataType, aclTensor* out),
   put(out, at::mean(wide(x), dims->v, keep)))
OP(aclnnReduceSum, P(aclTensor* x, aclIntArray* dims, bool keep, aclDataType, aclTensor* out),
   put(out, at::sum(wide(x), dims->v, keep)))
OP(aclnnNorm, P(aclTensor* x, aclScalar* p, aclIntArray* dims, bool keep, aclTensor* out),
   put(out, at::norm(wide(x), p->s, dims->v, keep)))
OP(aclnnLinalgVectorNorm, P(aclTensor* x, aclScalar* p, aclIntArray* dims, bool keep, aclDataType, aclTensor* out),
   put(out, at::linalg_vector_norm(wide(x), p->s, dims->v, keep)))
OP(aclnnAll, P(aclTensor* x, aclIntArray* dims, bool keep, aclTensor* out),
   put(out, dims->v.empty() ? raw(x).to(at::kBool).all() : at::all(raw(x).to(at::kBool), dims->v, keep)))
OP(aclnnAny, P(aclTensor* x, aclIntArray* dims, bool keep, aclTensor* out),
   put(out, dims->v.empty() ? raw(x).to(at::kBool).any() : at::any(raw(x).to(at::kBool), dims->v, keep)))
OP(aclnnArgMax, P(aclTensor* x, int64_t dim, bool keep, aclTensor* out),
   put(out, at::argmax(raw(x), dim, keep)))
UNARY(aclnnMax, at::max(x))

// Element by element.
UNARY(aclnnRelu, at::relu(x))
UNARY(aclnnGelu, at::gelu(x))
UNARY(aclnnTanh, at::tanh(x))
UNARY(aclnnSigmoid, at::sigmoid(x))
UNARY(aclnnSilu, at::silu(x))
UNARY(aclnnAbs, at::abs(x))
UNARY(aclnnExp, at::exp(x))
UNARY(aclnnSqrt, at::sqrt(x))
UNARY(aclnnRsqrt, at::rsqrt(x))
UNARY(aclnnNeg, at::neg(x))
UNARY(aclnnIsNegInf, at::isneginf(x))
UNARY(aclnnIsPosInf, at::isposinf(x))
UNARY(aclnnIsFinite, at::isfinite(x))
UNARY(aclnnLogicalNot, at::logical_not(x))
UNARY(aclnnBitwiseNot, at::bitwise_not(x))
OP(aclnnInplaceRelu, P(aclTensor* x), raw(x).relu_())
OP(aclnnGeluV2, P(aclTensor* x, int64_t tanh, aclTensor* out),
   put(out, at::gelu(wide(x), tanh ? "tanh" : "none")))
OP(aclnnAdd, P(aclTensor* a, aclTensor* b, aclScalar* alpha, aclTensor* out),
   put(out, at::add(wide(a), wide(b), alpha->s)))
OP(aclnnAdds, P(aclTensor* a, aclScalar* b, aclScalar* alpha, aclTensor* out),
   put(out, at::add(wide(a), b->s, alpha->s)))
OP(aclnnSub, P(aclTensor* a, aclTensor* b, aclScalar* alpha, aclTensor* out),
   put(out, at::sub(wide(a), wide(b), alpha->s)))
OP(aclnnSubs, P(aclTensor* a, aclScalar* b, aclScalar* alpha, aclTensor* out),
   put(out, at::sub(wide(a), b->s, alpha->s)))
OP(aclnnInplaceAdd, P(aclTensor* a, aclTensor* b, aclScalar* alpha),
   put(a, at::add(wide(a), wide(b), alpha->s)))
OP(aclnnInplaceAdds, P(aclTensor* a, aclScalar* b, aclScalar* alpha),
   put(a, at::add(wide(a), b->s, alpha->s)))
OP(aclnnInplaceMul, P(aclTensor* a, aclTensor* b), put(a, at::mul(wide(a), wide(b))))
OP(aclnnInplaceMuls, P(aclTensor* a, aclScalar* b), put(a, at::mul(wide(a), b->s)))
BINARY(aclnnMul, at::mul(x, y))
BINARY(aclnnDiv, at::div(x, y))
BINARY(aclnnMaximum, at::maximum(x, y))
BINARY(aclnnMinimum, at::minimum(x, y))
SCALAR(aclnnMuls, at::mul(x, s))
SCALAR(aclnnDivs, at::div(x, s))
SCALAR(aclnnClampMin, at::clamp_min(x, s))
SCALAR(aclnnClampMax, at::clamp_max(x, s))
SCALAR(aclnnPowTensorScalar, at::pow(x, s))
OP(aclnnHardtanh, P(aclTensor* x, aclScalar* low, aclScalar* high, aclTensor* out),
   put(out, at::clamp(wide(x), low->s, high->s)))
OP(aclnnInplaceHardtanh, P(aclTensor* x, aclScalar* low, aclScalar* high),
   put(x, at::clamp(wide(x), low->s, high->s)))
OP(aclnnClamp, P(aclTensor* x, aclScalar* low, aclScalar* high, aclTensor* out), {
  const auto raised = low ? at::clamp_min(wide(x), low->s) : wide(x);
  put(out, high ? at::clamp_max(raised, high->s) : raised);
})

// Comparison and logic.
BINARY(aclnnEqTensor, at::eq(x, y))
BINARY(aclnnNeTensor, at::ne(x, y))
BINARY(aclnnGtTensor, at::gt(x, y))
BINARY(aclnnGeTensor, at::ge(x, y))
BINARY(aclnnLtTensor, at::lt(x, y))
BINARY(aclnnLeTensor, at::le(x, y))
BINARY(aclnnLogicalAnd, at::logical_and(x, y))
BINARY(aclnnBitwiseAndTensor, at::bitwise_and(x, y))
SCALAR(aclnnEqScalar, at::eq(x, s))
SCALAR(aclnnNeScalar, at::ne(x, s))
SCALAR(aclnnGtScalar, at::gt(x, s))
SCALAR(aclnnGeScalar, at::ge(x, s))
SCALAR(aclnnLtScalar, at::lt(x, s))
SCALAR(aclnnLeScalar, at::le(x, s))
SCALAR(aclnnBitwiseAndScalar, at::bitwise_and(x, s))
OP(aclnnInplaceLogicalAnd, P(aclTensor* a, aclTensor* b), raw(a).logical_and_(raw(b)))
OP(aclnnInplaceBitwiseAndTensor, P(aclTensor* a, aclTensor* b), raw(a).bitwise_and_(raw(b)))
OP(aclnnInplaceMaskedFillScalar, P(aclTensor* x, aclTensor* mask, aclScalar* s), raw(x).masked_fill_(raw(mask), s->s))
OP(aclnnSWhere, P(aclTensor* c, aclTensor* a, aclTensor* b, aclTensor* out),
   put(out, at::where(raw(c), raw(a), raw(b))))
