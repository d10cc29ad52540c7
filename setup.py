"""Build script of the package; settings of the tools are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="flexgen_h2o",
    version="0.1.0",
    description="High-throughput text generation with OPT models that do not fit the accelerator: "
    "FlexGen's block schedule with H2O's eviction of the KV cache",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["flexgen_h2o", "flexgen_h2o.*"]),
    package_data={"flexgen_h2o.demo": ["README.md", "model/*", "heldout/*"]},
    zip_safe=False,
    install_requires=[
        "torch>=2.4",
        "numpy",
        "transformers>=4.46",
        "pulp",
        "tqdm",
        "safetensors",
        "tokenizers",
        "huggingface_hub",
        "psutil",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "ruff", "mypy"],
        "plots": ["matplotlib"],
        "bench": ["accelerate", "deepspeed", "ctranslate2"],
        "eval": ["lm-eval", "sacrebleu"],
        "ray": ["ray"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
