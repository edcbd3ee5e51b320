#!/usr/bin/env bash
# sbatch --nodes 4 --gpus-per-node 8 deploy/slurm.sh --run-name digits --config configs/digits.yaml --num-workers 32
#
# A Ray cluster of one Ray node for each Slurm node, `python -m app.train` with the arguments given here on the first,
# and the end of both. To be submitted from the repository, on a disk that all nodes see, with the packages in .venv
# or on the PATH.
#
# Before the time limit the run saves a checkpoint, and the job goes back into the queue to go on with it. To stop it
# with a checkpoint: scancel --batch --signal=TERM JOBID.
#SBATCH --job-name=evenkeel
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
: "${SLURM_JOB_ID:?submit this script with sbatch}"
if [[ -x .venv/bin/ray ]]; then export PATH="$PWD/.venv/bin:$PATH"; fi

state=$(mktemp -d) # for its user alone
touch "$state/mlflow"
# All nodes see this directory, and not always the home. Ignored by git, and by `ray job submit`.
token="$PWD/runs/.token-$SLURM_JOB_ID"
trap 'rm -rf "$state" "$token"' EXIT

# Without a token anybody who reaches these nodes could run code as you. Ray writes a new one with the umask's mode.
export RAY_AUTH_MODE=token
mkdir -p runs
rm -f "$token" # of this job, before it was put back: its mode would stay
(umask 077 && ray get-auth-token --generate >"$token")
export RAY_AUTH_TOKEN_PATH=$token
# MLflow's password is for the training command. srun would send it to all nodes, where Ray's workers would have it.
for name in "${!MLFLOW_TRACKING_@}"; do
    declare -p "$name" >>"$state/mlflow"
    unset "$name"
done
# Seconds for all nodes to come: starting Python from a shared disk is slow.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT="${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-300}"

# A job that comes back must find its run again, and a generated name would be another one.
case " $* " in
    *" --run"[-_]"name"[\ =]*) ;;
    *) set -- --run-name "slurm-$SLURM_JOB_ID" "$@" ;;
esac

# This script runs on the job's first node, and so do Ray's head and the training command. By its address: the node's
# own name is often 127.0.1.1 there, by which `ray symmetric-run` does not see that it is the head.
address="$(python -c 'import ray; print(ray.util.get_node_ip_address())'):$((20000 + SLURM_JOB_ID % 10000))"

# Only the training command is told to stop. `ray symmetric-run` would kill it at once, and Ray's own processes
# would take the workers from it before they have saved.
# shellcheck disable=SC2317,SC2329  # called by the traps
stop() {
    signalled=yes
    if [[ -s $state/pid ]]; then kill -TERM "$(<"$state/pid")"; else kill -TERM "$step"; fi 2>/dev/null || true
}
requeue=
trap stop TERM
trap 'requeue=yes; stop' USR1

# shellcheck disable=SC2016  # the inner shell expands these
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_ON_NODE" --num-gpus "${SLURM_GPUS_ON_NODE:-0}" -- \
    bash -c 'echo $$ >"$0/pid"; source "$0/mlflow"; RAY_ADDRESS=$1 exec python -m app.train "${@:2}"' \
    "$state" "$address" "$@" &
step=$!

while code=0 signalled=; wait "$step" || code=$?; [[ $signalled ]]; do :; done # a trap ends wait, not the step

if [[ ! -s $state/pid ]]; then
    echo "training was not started" >&2 # symmetric-run exits with 0 where Ray did not start
    exit 1
elif [[ $requeue && $code == 143 ]] && ((SECONDS > 900)); then # a shorter one could come back for ever
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
