// The definition lies in the package, because CUDA kernels are compiled from it at run time.
#pragma once

#include "../../src/strata/quant/exact.h"
