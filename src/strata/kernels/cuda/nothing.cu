// A kernel that does nothing: a graph of these is what launches alone cost.

extern "C" __global__ void nothing() {}
