# The program for NVIDIA GPUs:
#     docker build -f docker/gpu.Dockerfile -t long-context-trainer:gpu .
#     docker run --rm --gpus all --user "$(id -u)" --shm-size 16g -v "$PWD:/work" long-context-trainer:gpu doctor
#
# The image brings PyTorch, CUDA and a compiler. Its version of PyTorch is the version of requirements.txt, and its version of
# CUDA is the version of the wheels of FlashAttention-3.
# A release pins the image by its digest: --build-arg IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel@sha256:...
ARG IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${IMAGE}

# The Python of the image may be the system's, which pip changes only with this variable.
ENV PIP_BREAK_SYSTEM_PACKAGES=1

WORKDIR /opt/long-context-trainer
# The constraint keeps the PyTorch of the image: 2.13.0+cu130 is a build of 2.13.0.
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt \
    && python -c 'import torch; assert torch.version.cuda, "pip has replaced the PyTorch of the image"'

COPY LICENSE README.md pyproject.toml ./
COPY lct_inference lct_inference
COPY lct_planner lct_planner
COPY lct_tools lct_tools
COPY longshard longshard
COPY trainer trainer
COPY train_configs train_configs
# The extra `linear` is fla-core: kernels of linear attention.
RUN pip install --no-cache-dir -c requirements.txt '.[linear,float8,qlora,parquet,hub,remote,report,serve]' \
    && python -c 'import torch; assert torch.version.cuda, "pip has replaced the PyTorch of the image"' \
    && lct --version

# FlashAttention-3 for Hopper, only as a wheel: its compilation takes hours. Without it PyTorch's FlashAttention-2 computes.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps --only-binary :all: \
        flash-attn-3 --index-url https://download.pytorch.org/whl/cu130 \
    || echo "FlashAttention-3 has no wheel for this image. lct doctor says which kernels there are." >&2

# With --user "$(id -u)" the files in /work belong to the caller, who has no entry in /etc/passwd here.
RUN useradd --uid 10001 --create-home lct \
    && install --directory --mode 1777 /work /home/lct
ENV HOME=/home/lct USER=lct
USER 10001
WORKDIR /work
ENTRYPOINT ["lct"]
