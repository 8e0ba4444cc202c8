# trt-eagle3 with its CUDA kernels, for a torch engine on an NVIDIA GPU (README.md, "In a container"):
#   docker build --tag trt-eagle3 .
#   docker run --gpus all --publish 8000:8000 --volume "$PWD/engines:/work/engines" trt-eagle3 serve engines/NAME --host 0.0.0.0
# The checkpoints and bundles are mounted, not copied in. CUDA 13 needs driver 580 or newer.
ARG CUDA=13.0.1

FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS kernels
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends cmake g++ make python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY plugins plugins
# As cmake names them; fewer build faster: --build-arg ARCHITECTURES=90a-real for an H100 or H200.
ARG ARCHITECTURES="80-real;89-real;90a-real;90-virtual"
RUN cmake -S plugins -B /build "-DTRT_EAGLE3_ARCHITECTURES=${ARCHITECTURES}" \
    && cmake --build /build --parallel "$(nproc)"
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY trt_eagle3 trt_eagle3
RUN mkdir /prebuilt \
    && find /build -name 'libtrt_eagle3_*.so' -exec cp {} /prebuilt/ \; \
    && python3 -m venv /venv \
    && TRT_EAGLE3_PREBUILT=/prebuilt /venv/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
# The versions that `make test` runs with, without the hashes: a constraint binds whatever is installed.
COPY requirements.lock requirements-torch.lock ./
RUN cat requirements.lock requirements-torch.lock \
    | sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\).*/\1/p' > /wheels/constraints.txt

FROM nvidia/cuda:${CUDA}-base-ubuntu24.04
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --no-create-home --uid 10001 --home-dir /work eagle \
    && install --directory --mode=1777 /work /work/engines
COPY --from=kernels /wheels /wheels
# hadolint ignore=DL3013
RUN python3 -m venv /opt/trt-eagle3 \
    && wheel=$(find /wheels -name 'trt_eagle3-*.whl') \
    && /opt/trt-eagle3/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt "${wheel}[serve,video]"
ENV PATH=/opt/trt-eagle3/bin:$PATH HOME=/work
USER 10001
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["trt-eagle3"]
CMD ["--help"]
