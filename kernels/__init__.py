"""Device side: CuTe DSL kernels for sm_90a. Imports cutlass and the standard library, never torch, never hopper_fa3."""
