# What is to be learned from some minutes of a GPU on a machine without a network, in two calls.
#
# Beforehand, where there is a network, one folder is filled with what that machine lacks. It has Python 3.12, torch,
# transformers, accelerate, peft and pytest.
#
#     python tests/benchmarks/rival.py --collect build/gpu               # unsloth, trl and what they need
#     python tests/benchmarks/gpu_learning.py --split build/gpu/model    # the pretrained model, in parts
#     pip install --no-deps --target build/gpu/trl gguf                  # reads the model's file
#     head -n 2048 train.jsonl > build/gpu/train.jsonl                   # lines with `problem` and `answer`
#
# There, from the root of the repository: `bash tests/benchmarks/gpu_session.sh 1 build/gpu results`, then `2`.
#
# Tests, gradients and pass rates only have to be right, so they run side by side. What is timed runs alone.

call=$1
packages=$(realpath "$2")
results=$3
mkdir -p "$results"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRL_EXPERIMENTAL_SILENCE=1 PYTHONPATH=$PWD:$packages/trl
benchmarks=tests/benchmarks

note() { echo "== $SECONDS s: $1"; }

if [ "$call" = 1 ]; then
    (timeout 170 python3 -m pytest -v -n 5 -m gpu -p no:cacheprovider tests/trainer/test_gpu.py &>"$results/tests.log"
        note "tests: exit code $?, $(tail -n 1 "$results/tests.log")") &
    (python3 $benchmarks/gpu.py --parts parity --output "$results/parity.json" &>"$results/parity.log"
        note "parity: exit code $?") &
    wait
    python3 $benchmarks/gpu.py --parts adapters --seconds 100 --output "$results/adapters.json"
    note "adapters"
    python3 $benchmarks/gpu.py --parts training --seconds "${TRAINING_SECONDS:-110}" --output "$results/training.json"
    note "training"
else
    learn="python3 $benchmarks/gpu_learning.py --join $packages/model --data $packages/train.jsonl"
    learn="$learn --rates $results/rates.json --output $results/learning.json"
    (timeout 150 $learn --only-rates &>"$results/rates.log"
        note "pass rates: exit code $?") &
    rival="python3 $benchmarks/rival.py --packages $packages --arms ours unsloth stock --output $results/rival.json"
    timeout 180 $rival --model "Qwen3 1.7B" --tasks gradient
    note "gradients of rivals"
    wait
    timeout 330 $rival --model "Qwen3 1.7B" --tasks speed
    note "speed of rivals"
    timeout 300 $learn --arms ours switches --seconds "${ARM_SECONDS:-70}"
    note "learning"
fi
