// From C arguments to launch parameters, checked. What a check finds wrong is in it; the parameters then mean nothing.
#pragma once

#include "../kernels/params.h"
#include "check.h"
#include "lists.h"

namespace trt_eagle3 {

#define TE3_DECLARE(op, Params, num_tensors) Params op##_params(const te3_##op##_args& args, Check* check);
TE3_KERNELS(TE3_DECLARE)
TE3_KERNELS_WITH_WORKSPACE(TE3_DECLARE)
#undef TE3_DECLARE

}  // namespace trt_eagle3
