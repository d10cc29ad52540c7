"""How the demo model is trained; scripts/train_demo.py is the command."""
