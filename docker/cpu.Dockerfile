# The program for CPUs:
#     docker build -f docker/cpu.Dockerfile -t long-context-trainer:cpu .
#     docker run --rm --user "$(id -u)" --shm-size 1g -v "$PWD:/work" long-context-trainer:cpu train debug_model --ngpu 2
#
# A release pins the image by its digest: --build-arg IMAGE=python:3.11-slim-bookworm@sha256:...
ARG IMAGE=python:3.11-slim-bookworm
FROM ${IMAGE}

# torch.compile and the planner's measurements compile C++. Debian keeps one version of g++ in a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/long-context-trainer
# The packages first: they change more rarely than the program, so that the layer is kept.
COPY requirements.txt ./
RUN sed -nE 's/^(torch==[0-9.]+).*/\1/p' requirements.txt > torch.txt \
    && pip install --no-cache-dir -r torch.txt --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir -r requirements.txt

COPY LICENSE README.md pyproject.toml ./
COPY lct_inference lct_inference
COPY lct_planner lct_planner
COPY lct_tools lct_tools
COPY longshard longshard
COPY trainer trainer
COPY train_configs train_configs
RUN pip install --no-cache-dir -c requirements.txt '.[parquet,hub,remote,report,serve]' \
    && lct --version

# With --user "$(id -u)" the files in /work belong to the caller, who has no entry in /etc/passwd here.
RUN useradd --uid 10001 --create-home lct \
    && install --directory --mode 1777 /work /home/lct
ENV HOME=/home/lct USER=lct
USER 10001
WORKDIR /work
ENTRYPOINT ["lct"]
