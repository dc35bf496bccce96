"""`python -m fused_grad_optimizer.cli`: the `forge` command where its script is not on the path."""

from fused_grad_optimizer.cli import main

if __name__ == "__main__":
    main()
