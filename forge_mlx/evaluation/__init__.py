"""How well a model predicts texts, answers and the right choices."""
