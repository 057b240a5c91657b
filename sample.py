"""Text from a run, continuing a prompt.

    python sample.py out/demo/rd-s1 --prompt "Return the" --tokens 300 --temperature 0.8 --top-k 50 --seed 1

The draws are a function of --seed alone.
"""

import argparse

from lib.devices import pick_device
from lib.errors import UserError, run_main
from lib.run_folder import load_run
from lib.tokenizers import get_tokenizer


def main(argv=None):
    parser = argparse.ArgumentParser(description="Text from a run, continuing a prompt.")
    parser.add_argument("run", help="a run's folder, such as out/demo/rd-s1")
    parser.add_argument("--prompt", default="", help="text to continue; empty: the start of a document")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (default: %(default)s)")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens only (default: from all)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        raise UserError(f"--tokens: {args.tokens} must be at least 1")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed: {args.seed} must lie in 0 .. 2**63 - 1")

    import torch

    device = pick_device(args.device)
    generator = torch.Generator(device).manual_seed(args.seed)
    model, state = load_run(args.run, device)
    encoding = get_tokenizer(state["config"]["tokenizer"])
    # as in training, a document starts with <|endoftext|>
    idx = torch.tensor([[encoding.eot_token, *encoding.encode_ordinary(args.prompt)]], device=device)
    try:
        tokens = model.generate(idx, args.tokens, args.temperature, args.top_k, generator)[0, 1:].tolist()
    except ValueError as error:
        raise UserError(str(error)) from error
    print(encoding.decode(tokens))


if __name__ == "__main__":
    run_main(main)
