// A kernel that does nothing: a graph of these is what launches alone cost. It notes where a profiled round ends.
#include "device.h"

extern "C" __global__ void nothing() { strata::device::wait_for_previous(); }
