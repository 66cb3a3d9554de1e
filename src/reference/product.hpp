// Products of one tile: C[m, n] = sum over k of A[m, k] B[n, k], with A and B first read in an operand format. Where
// the specification of every GEMM's numerics lies: bf16 operands are rounded once; scaled formats multiply codes inside
// a group of K and promote the group's sum with its scales in fp32, group after group.
#pragma once

#include "core/span2d.hpp"
#include "numeric/bf16.hpp"
#include "numeric/recipe.hpp"

namespace weft {

// A and B may be strided views of any data dtype. Real is float, or double for the fp64 recipe. `kAdd` goes on from
// what C holds, as one longer contraction would. Deterministic: the same tile gives the same bits in any thread.
enum class Accumulate { kOverwrite, kAdd };

template <class Real, class A, class B>
void product(Span2d<const A> a, OperandFormat a_format, Span2d<const B> b, OperandFormat b_format, Span2d<Real> c,
             Accumulate accumulate = Accumulate::kOverwrite);

}  // namespace weft
