#!/bin/bash
# Two nodes of eight GPUs under Slurm, requeued when the time is up: sbatch config/slurm.sh
# Not run yet. All nodes need the repository and out_dir on one file system.
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --time=12:00:00 --requeue --signal=B:TERM@120
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110  # seconds that torchrun lets the ranks save, else 30; torch 2.11 ignores it
trap 'kill -TERM $!; wait $!; scontrol requeue $SLURM_JOB_ID' TERM
srun torchrun --nnodes="$SLURM_NNODES" --nproc_per_node=8 --rdzv_backend=c10d \
    --rdzv_endpoint="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1):29500" \
    train.py "${@:-config/mhar_1b.py}" &
wait $!
