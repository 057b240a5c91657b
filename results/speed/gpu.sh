#!/usr/bin/env bash
# Speed and memory on one GPU, then 200 steps of S on real tokens. Most of the time is compiling: minutes a variant.
#
#   results/speed/gpu.sh [--key=value ...]      keys of train.py, for both scripts, after this file's own
#   DATA=FOLDER        shards of GPT-2 tokens (default data/docs-gpt2, prepared here where it is missing)
#   OUT=FOLDER         where everything goes (default results/speed/gpu)
#   PARTS="s train m"  which parts, in this order
#   A dry run on a CPU: OUT=dry-run results/speed/gpu.sh --device=cpu --dtype=float32 --compile=false --n_layer=2 --d_model=32 --n_head=2 \
#       --d_mlp=80 --n_blocks=2 --context=32 --micro_batch=4 --batch_tokens=256 --max_tokens=51200
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-results/speed/gpu} DATA=${DATA:-data/docs-gpt2}
mkdir -p "$OUT"
failed=0
part() { printf '\n== %s\n' "$*"; timeout -k 10 "$limit" "$@" || { echo "FAILED with status $?: $*"; failed=1; }; }

{ nvidia-smi || true; python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'; } > "$OUT/machine.txt" 2>&1
[[ -e $DATA/manifest.json ]] || limit=120 part python prepare_data.py --source docs --tokenizer gpt2 --out "$DATA"

for name in ${PARTS:-s train m}; do
    case $name in
        s)  limit=1500 part python bench.py configs/s.toml --variants=plain,prenorm,block,rd --data_dir="$DATA" --device=cuda --dtype=bfloat16 \
                --compile=true --micro_batch=32 --batch_tokens=65536 "$@" --json="$OUT/s.json" ;;
        m)  limit=1500 part python bench.py configs/m.toml --variants=prenorm,block,rd --data_dir="$DATA" --device=cuda --dtype=bfloat16 \
                --compile=true --micro_batch=16 --batch_tokens=32768 --rounds=15 "$@" --json="$OUT/m.json" ;;
        train)
            rm -rf "$OUT/train"
            TORCH_LOGS=recompiles limit=900 part python train.py configs/s.toml --variant=rd --data_dir="$DATA" --device=cuda --dtype=bfloat16 \
                --compile=true --micro_batch=32 --batch_tokens=65536 --max_tokens=13107200 --warmup_tokens=1310720 --milestones= \
                --eval_tokens=262144 --eval_interval=50 "$@" --out_dir="$OUT/train" > "$OUT/train.log" 2>&1
            # the model has two graphs, with gradients and without: both are there after the first evaluation
            awk '/ validation /{ seen = 1 } seen && /[Rr]ecompil/' "$OUT/train.log" > "$OUT/recompiles.txt"
            python - "$OUT" <<'END' || failed=1
import json, sys
folder = sys.argv[1]
losses = [r["loss"] for r in map(json.loads, open(f"{folder}/train/metrics.jsonl")) if r["kind"] == "train"]
recompiles = sum(1 for _ in open(f"{folder}/recompiles.txt"))
print(f"200 steps of S, rd: loss {losses[0]:.3f} -> {losses[-1]:.3f}; {recompiles} lines about recompiles after the first evaluation")
sys.exit(not losses[-1] < losses[0])
END
            ;;
    esac
done
rm -f "$OUT"/train/ckpt*.pt
exit $failed
