#!/usr/bin/env bash
# Occupancy, share of the FFMA limit and shared-memory bank conflicts of the fp32 kernels, from Nsight Compute's counters:
#     bench/profile.sh build/cmake/bench/fmha_bench > bench/results/ncu.csv
# One launch of each row; clocks are left as they are.
set -euo pipefail
bench=$1
metrics=sm__warps_active.avg.pct_of_peak_sustained_active
metrics+=,sm__sass_thread_inst_executed_op_ffma_pred_on.sum.pct_of_peak_sustained_elapsed
metrics+=,sm__sass_thread_inst_executed_op_ffma_pred_on.sum.per_cycle_elapsed
metrics+=,sm__inst_executed.avg.per_cycle_elapsed
metrics+=,l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum,l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum
metrics+=,l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum
metrics+=,launch__registers_per_thread,gpu__time_duration.sum
for row in b2/n8192/h16/d64 b2/n4096/h16/d128 b1/n4096/h16/d256 b10/n1024/h64/d32; do
  for kind in full causal; do
    echo "# $row/$kind"
    ncu --clock-control none --csv --page raw -k regex:fmha_kernel -c 1 --metrics "$metrics" \
      "$bench" --benchmark_filter="fmha/$row/$kind" --benchmark_min_time=0.001 2> /dev/null | grep -v '^=='
  done
done
