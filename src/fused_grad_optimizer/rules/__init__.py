"""Update rules: what is computed for each weight element. One optimizer, one file, one short function."""

from fused_grad_optimizer.rules import adamw, lion, sgd  # noqa: F401  (importing registers them)
from fused_grad_optimizer.rules._rule import RULES, UPDATES, Rule, Update, get_rule, number, switch, twin, whole

__all__ = ["RULES", "UPDATES", "Rule", "Update", "get_rule", "number", "switch", "twin", "whole"]
