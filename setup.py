"""Build script of the package; settings of the tools are in pyproject.toml."""

from setuptools import Extension, find_packages, setup

# A plain library that is loaded through ctypes. OpenMP's functions are not linked: the process has torch's. Where there
# is no compiler, the same runs on torch's operations.
NATIVE = Extension(
    "flexgen_h2o.kernels._native",
    sources=[
        "flexgen_h2o/kernels/native/attention.cpp",
        "flexgen_h2o/kernels/native/panels.cpp",
        "flexgen_h2o/kernels/native/quantised.cpp",
    ],
    depends=[
        "flexgen_h2o/kernels/native/attention.h",
        "flexgen_h2o/kernels/native/attention.inc",
        "flexgen_h2o/kernels/native/bfloat16_codes.inc",
        "flexgen_h2o/kernels/native/four_bits.inc",
        "flexgen_h2o/kernels/native/quantised.h",
        "flexgen_h2o/kernels/native/quantised.inc",
        "flexgen_h2o/kernels/native/quantised_avx512.inc",
        "flexgen_h2o/kernels/native/quantised_bf16.inc",
        "flexgen_h2o/kernels/native/quantised_products.inc",
        "flexgen_h2o/kernels/native/vectors.h",
        "flexgen_h2o/kernels/native/vectors_avx2.inc",
        "flexgen_h2o/kernels/native/vectors_avx512.inc",
        "flexgen_h2o/kernels/native/whole_entries.inc",
    ],
    language="c++",
    extra_compile_args=["-O3", "-std=c++17", "-fopenmp", "-fno-math-errno", "-w"],
    optional=True,
)

setup(
    name="flexgen_h2o",
    version="0.1.0",
    description="High-throughput text generation with OPT models that do not fit the accelerator: "
    "FlexGen's block schedule with H2O's eviction of the KV cache",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=[*find_packages(include=["flexgen_h2o", "flexgen_h2o.*"]), "flexgen_h2o.hardware_files"],
    package_dir={"flexgen_h2o.hardware_files": "policies/hardware"},
    package_data={
        "flexgen_h2o.demo": ["README.md", "model/*", "heldout/*"],
        "flexgen_h2o.hardware_files": ["*.json"],
    },
    ext_modules=[NATIVE],
    zip_safe=False,
    install_requires=[
        "torch>=2.4",
        "numpy",
        "transformers>=4.46",
        "pulp<4",  # which no longer brings the solver along
        "tqdm",
        "safetensors",
        "tokenizers",
        "huggingface_hub",
        "psutil",
    ],
    extras_require={
        # torch for CUDA brings Triton along; here it interprets and compiles the kernels for tests without a GPU.
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "ruff",
            "mypy",
            "matplotlib",
            "prometheus-client",
            "sacrebleu",
            "triton; platform_system == 'Linux'",
        ],
        "plots": ["matplotlib"],
        "metrics": ["prometheus-client"],
        "bench": ["accelerate", "deepspeed", "ctranslate2"],
        "eval": ["lm-eval", "sacrebleu"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
