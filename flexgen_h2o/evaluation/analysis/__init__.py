"""What the H2O paper found in attention (Zhang et al. 2023, arXiv 2306.14048), looked for in any model.

A module for each finding: functions of plain tensors, which say what they measure, and `analyse`, which applies them to
a model that reads documents.
"""
