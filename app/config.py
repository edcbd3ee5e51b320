"""The one Config: every setting's default, limits, unit and meaning stand here, once.

A field's name is its command line flag (--batch-size), its YAML key (batch_size) and its MLflow
parameter. This module imports neither torch nor ray nor mlflow: a wrong value is refused at once.
"""

import difflib
import os
import re
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from app.errors import BadInput

# What a setting does to the result, and so whether the same run may go on when it differs:
#   result  changes the numbers: a resumed run must have the same value
#   length  how long to train, or how much to put up with: may be raised, where the schedule does not
#           depend on it
#   free    where, how fast or how visibly: may differ at every start
Effect = Literal["result", "length", "free"]

DATASETS = (
    "digits",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
    "image-folder",
    "synthetic",
    "text",
    "stdlib-docs",
    "parquet",
)
TEXT_DATASETS = ("text", "stdlib-docs")
WITHOUT_FILES = ("digits", "synthetic", "stdlib-docs")
TOKENIZERS = ("word", "bpe")  # that are trained; anything else is a file
WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth")
# 'pkg.module:attribute', the user's own
CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")

# Settings that are gone, each with what to use now.
REPLACED = {
    "grad_accumulation": (
        "use micro_batch_size (--micro-batch-size), the most samples that a worker computes at a time: "
        "batch_size / num_workers / grad_accumulation"
    )
}

# Validation context: check each setting alone, since flags may still change the others.
ALONE = "alone"

GROUPS = {
    "run": "What the run is called and where its files go.",
    "cluster": "What it runs on. Nothing here changes the result.",
    "data": "What it learns from.",
    "model": "What learns.",
    "training": "How it learns. Steps and batches are global: they do not change with num_workers.",
    "checkpoints": "What is saved, and when to stop.",
    "tracking": "What is recorded.",
}


def setting(default: Any, group: str, help: str, *, effect: Effect = "result", **limits: Any) -> Any:
    assert group in GROUPS
    extra: dict[str, Any] = {"group": group, "effect": effect}
    return Field(default, description=help, json_schema_extra=extra, **limits)


class Config(BaseModel):
    """All settings of a run. Raises BadInput, and nothing else, for values that cannot work."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    run_name: str | None = setting(
        None, "run", "The run's identity: the same name resumes. Generated and printed when absent.", effect="free"
    )
    output_dir: str = setting(
        "runs", "run", "Directory of all runs: a path, or a URI such as s3://bucket/runs.", effect="free"
    )

    num_workers: int | str = setting(
        1,
        "cluster",
        "Training processes (ranks); MIN:MAX: as many as the cluster has room for at any time.",
        effect="free",
    )
    resize_after_s: float = setting(
        60.0, "cluster", "Seconds that an elastic run trains before it takes up more workers.", effect="free", ge=0
    )
    cpus_per_worker: float = setting(
        1.0, "cluster", "CPU cores reserved for each worker; fractions are allowed.", effect="free", ge=0.01
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "cluster", "auto takes a GPU for each worker when the cluster has one.", effect="free"
    )
    loader_workers: int | None = setting(
        None,
        "cluster",
        "DataLoader processes for each worker. Default: 0 for data in memory, 2 for data read from files.",
        effect="free",
        ge=0,
    )
    in_memory_mb: int = setting(
        1024,
        "cluster",
        "Decoded images of an image-folder up to this size in MiB are held in memory, more are read as needed.",
        effect="free",
        ge=0,
    )
    max_failures: int = setting(
        3, "cluster", "Times that training restarts by itself after a worker died.", effect="free", ge=0
    )
    hang_timeout_s: float = setting(
        600.0,
        "cluster",
        "Seconds without a step after which workers are ended and started anew; a checkpoint must be saved in less.",
        effect="free",
        ge=1,
        le=1e6,
    )

    setup_timeout_s: float = setting(
        1800.0,
        "cluster",
        "Seconds without progress before the first step after which workers are ended and started anew. Progress: "
        "writing files, as a download does; data that takes longer to compute needs more.",
        effect="free",
        ge=1,
        le=1e6,
    )

    dataset: str = setting("digits", "data", f"{', '.join(DATASETS)}, or package.module:callable for your own.")
    data_dir: str | None = setting(
        None,
        "data",
        "Where the data lies: a folder, or for text a table; a path, or a URI such as s3://bucket/images, of which "
        "each node makes a copy. Default for the torchvision data sets: data.",
        effect="free",
    )
    cache_dir: str | None = setting(
        None,
        "data",
        "Where a node keeps its copies of data at a URI. Default: ~/.cache/evenkeel.",
        effect="free",
    )
    download: bool = setting(
        True, "data", "Fetch a missing torchvision data set, once, before training.", effect="free"
    )
    val_fraction: float = setting(
        0.1, "data", "Share of the training data held out for validation where there is no val split.", gt=0, lt=1
    )
    image_size: int | None = setting(
        None, "data", "Pixels on a side that images are resized to. Default: the data set's own size.", ge=1, le=4096
    )
    image_channels: Literal[1, 3] | None = setting(
        None, "data", "1 (grey) or 3 (RGB), for image-folder and synthetic. Default: 3."
    )
    synthetic_samples: int | None = setting(
        None, "data", "Training samples of the synthetic data set. Default: 10000.", ge=10
    )
    image_column: str | None = setting(
        None,
        "data",
        "Of dataset parquet: the column with images, as the bytes of their files. Default: all columns of numbers.",
        min_length=1,
    )
    lanes: int = setting(
        16,
        "data",
        "Of dataset parquet: row groups that are read at a time, over all workers; a batch is drawn from all of them.",
        ge=1,
    )
    text_column: str = setting("text", "data", "Of dataset text: the column of the texts.", min_length=1)
    label_column: str = setting("label", "data", "Of dataset text, parquet: the column of the classes.", min_length=1)
    tokenizer: str = setting(
        "word",
        "data",
        "Of texts: word or bpe, trained on the training split; or a tokenizer.json file of the tokenizers library.",
        min_length=1,
    )
    vocab_size: int = setting(20_000, "data", "Of texts: the most tokens that a trained tokenizer knows.", ge=10)
    max_length: int = setting(128, "data", "Of texts: tokens after which they are cut off.", ge=1)
    synthetic_classes: int | None = setting(None, "data", "Classes of the synthetic data set. Default: 10.", ge=2)
    sampler: Literal[
        "shuffled", "sequential", "subset", "weighted", "balanced", "length-bucketed", "aspect-grouped"
    ] = setting(
        "shuffled",
        "data",
        "The order of training samples. subset: a fixed part, shuffled; weighted, balanced: drawn with replacement, "
        "by weight or all classes alike; length-bucketed, aspect-grouped: batches of similar length or of one shape.",
    )
    subset_fraction: float | None = setting(
        None, "data", "Of sampler subset: share of each class, the same samples for every seed.", gt=0, le=1
    )
    subset_file: str | None = setting(
        None, "data", "Of sampler subset: a text file of training sample ids from 0 on, one a line."
    )
    weight_column: str | None = setting(
        None,
        "data",
        "Of sampler weighted: a column of the text table, or of the image-folder's metadata.csv, which has file_name.",
    )
    max_bad_samples: int = setting(
        0,
        "data",
        "Unreadable images that are skipped in one pass over a split (an epoch, a validation); more end the run.",
        effect="length",
        ge=0,
    )
    drop_last: bool = setting(False, "data", "Leave out the batches at an epoch's end that are not full.")
    augment: Literal["auto", "none", "shift", "flip-crop", "randaugment"] = setting(
        "auto", "data", "Random changes to training images. auto: what is usual for the data set."
    )
    mixup: float = setting(0.0, "data", "Alpha of mixup; 0 is off.", ge=0)
    cutmix: float = setting(0.0, "data", "Alpha of cutmix; 0 is off.", ge=0)

    model: str = setting(
        "mnist-cnn",
        "model",
        "mnist-cnn, any torchvision classification model by its name; of texts text-lstm, text-transformer; "
        "or package.module:callable for your own.",
    )
    embedding_size: int = setting(128, "model", "Of text models: features of a token.", ge=1)
    hidden_size: int = setting(
        128, "model", "Of text-lstm: features of its state; of text-transformer: of its feed-forward layers.", ge=1
    )
    bidirectional: bool = setting(False, "model", "Of text-lstm: read the text from both ends.")
    num_layers: int = setting(2, "model", "Of text-transformer: encoder layers.", ge=1)
    num_heads: int = setting(4, "model", "Of text-transformer: attention heads, which share embedding_size.", ge=1)
    dropout: float = setting(0.1, "model", "Of text models: share of the features left out.", ge=0, lt=1)
    weights: str | None = setting(
        None,
        "model",
        "Starting weights: a torchvision weights name (DEFAULT), a .safetensors, .pt or .pth file with a state dict, "
        "or the path of a run or a checkpoint.",
    )
    sync_batchnorm: bool = setting(False, "model", "Batch norm over all workers' samples. GPUs only.")
    ema_decay: float = setting(
        0.0, "model", "Evaluate an exponential moving average of the weights; 0 is off.", ge=0, lt=1
    )

    epochs: int = setting(20, "training", "Passes over the training data.", effect="length", ge=1)
    max_steps: int | None = setting(
        None, "training", "Stop after this many optimizer steps, if that comes first.", effect="length", ge=1
    )
    batch_size: int = setting(128, "training", "Samples in one optimizer step, over all workers together.", ge=1)
    micro_batch_size: int | None = setting(
        None,
        "training",
        "Most samples that a worker computes in one forward and backward pass, to save memory; the gradients of a "
        "step are added up. Default: its whole share of the batch.",
        ge=1,
    )
    optimizer: Literal["sgd", "adam", "adamw"] = setting("adamw", "training", "The update rule.")
    lr: float = setting(2e-3, "training", "Peak learning rate.", gt=0)
    momentum: float | None = setting(None, "training", "Of sgd. Default: 0.9.", ge=0, lt=1)
    weight_decay: float = setting(1e-2, "training", "Weight decay of the optimizer.", ge=0)
    schedule: Literal["constant", "cosine", "linear", "step"] = setting(
        "cosine", "training", "How the learning rate falls after the warm-up: cosine and linear end at 0."
    )
    step_epochs: int | None = setting(None, "training", "Epochs between drops of schedule step. Default: 10.", ge=1)
    step_factor: float | None = setting(
        None, "training", "What schedule step multiplies the rate by. Default: 0.1.", gt=0, lt=1
    )
    warmup_epochs: float = setting(1.0, "training", "Epochs over which the rate rises from 0.", ge=0)
    label_smoothing: float = setting(0.0, "training", "Share of the target spread over all classes.", ge=0, lt=1)
    grad_clip: float | None = setting(None, "training", "Largest norm of the gradient. Default: no clipping.", gt=0)
    precision: Literal["fp32", "bf16", "auto"] = setting(
        "fp32",
        "training",
        "bf16: autocast; weights stay in fp32. auto: bf16 if the run starts on devices fast at it.",
    )
    grad_compression: Literal["none", "bf16"] = setting(
        "none",
        "training",
        "bf16: workers exchange gradients in half the bytes, rounded (one worker does not): for slow networks.",
    )
    channels_last: bool = setting(
        True, "training", "Memory layout of images that convolutions are faster in.", effect="free"
    )
    compile: bool = setting(False, "training", "torch.compile the model.", effect="free")
    find_unused_parameters: bool = setting(
        False, "training", "For models of which some parameters get no gradient in some steps.", effect="free"
    )
    seed: int = setting(
        0, "training", "Of weights, order, augmentation, dropout and your own code's random numbers.", ge=0, lt=2**32
    )
    deterministic: bool = setting(
        False, "training", "Only bit-reproducible GPU kernels; slower. CPUs always are.", effect="free"
    )

    checkpoint_every: int | None = setting(
        None, "checkpoints", "Steps between checkpoints. Default: after each validation.", effect="free", ge=1
    )
    validate_every: int | None = setting(
        None, "checkpoints", "Steps between validations within an epoch too. Default: at each epoch's end.", ge=1
    )
    keep_checkpoints: int = setting(
        2, "checkpoints", "Checkpoints kept: the best and the newest ones.", effect="free", ge=2
    )
    early_stop_patience: int | None = setting(
        None, "checkpoints", "Stop after this many epochs without a better val/accuracy.", effect="length", ge=1
    )

    log_every: int = setting(10, "tracking", "Steps between records of train/loss and perf/*.", effect="free", ge=1)
    experiment: str = setting("evenkeel", "tracking", "MLflow experiment.", effect="free", min_length=1)
    tracking_uri: str | None = setting(
        None,
        "tracking",
        "MLflow server or database; none: record nothing. Default: MLFLOW_TRACKING_URI, else ./mlflow.db.",
        effect="free",
    )

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_in_plain_words(cls, values: Any, handler: Any) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            # A field that may be of two types has an error for each: one is enough.
            first = {str(detail["loc"][0]): detail for detail in reversed(error.errors())}
            raise BadInput("\n".join(explain(detail) for detail in reversed(first.values()))) from None

    @field_validator("run_name")
    @classmethod
    def _run_name_is_a_plain_name(cls, name: str | None) -> str | None:
        # It becomes a directory's name, and Ray joins it to paths as it is.
        if name is not None and (not RUN_NAME.fullmatch(name) or ".." in name):
            raise ValueError(
                "allowed are up to 100 letters, digits, '.', '_' and '-', not starting with '.' or '-' and without '..'"
            )
        return name

    @field_validator("num_workers")
    @classmethod
    def _workers_are_a_number_or_a_range(cls, workers: int | str) -> int | str:
        low, high = _range_of(workers)
        if not 1 <= low <= high:
            raise ValueError("allowed are a number of at least 1, or MIN:MAX with 1 <= MIN <= MAX")
        return low if low == high else f"{low}:{high}"

    @property
    def min_workers(self) -> int:
        return _range_of(self.num_workers)[0]

    @property
    def max_workers(self) -> int:
        return _range_of(self.num_workers)[1]

    @field_validator("dataset")
    @classmethod
    def _dataset_is_known(cls, name: str) -> str:
        if name not in DATASETS and not CALLABLE.fullmatch(name):
            raise ValueError(
                f"allowed are {', '.join(DATASETS)} and package.module:callable{did_you_mean(name, DATASETS)}"
            )
        return name

    @field_validator("model")
    @classmethod
    def _model_is_known(cls, name: str) -> str:
        from app.models.names import MODELS, torchvision_models

        known = (*MODELS, *torchvision_models())
        if name not in known and not CALLABLE.fullmatch(name):
            raise ValueError(
                f"allowed are {', '.join(MODELS)}, torchvision's classification models (resnet18, ...) "
                f"and package.module:callable{did_you_mean(name, known)}"
            )
        return name

    def _is_from_torchvision(self) -> bool:
        from app.models.names import torchvision_models

        return self.model in torchvision_models()

    @model_validator(mode="after")
    def _settings_fit_together(self, info: ValidationInfo) -> Self:
        if info.context == ALONE:
            return self
        from app.models.names import TEXT_MODELS

        of_texts = self.dataset in TEXT_DATASETS
        for applies, name, where in (
            (self.optimizer == "sgd", "momentum", "--optimizer sgd"),
            (self.schedule == "step", "step_epochs", "--schedule step"),
            (self.schedule == "step", "step_factor", "--schedule step"),
            (self.dataset == "synthetic", "synthetic_samples", "--dataset synthetic"),
            (self.dataset == "synthetic", "synthetic_classes", "--dataset synthetic"),
            (
                self.dataset in ("synthetic", "image-folder") or self.image_column is not None,
                "image_channels",
                "--dataset image-folder or synthetic, or --image-column",
            ),
            (self.dataset not in WITHOUT_FILES, "data_dir", "data that is read from files"),
            (self.sampler == "subset", "subset_fraction", "--sampler subset"),
            (self.sampler == "subset", "subset_file", "--sampler subset"),
            (
                self.sampler == "weighted" and self.dataset in ("image-folder", "text"),
                "weight_column",
                "--sampler weighted and --dataset image-folder or text",
            ),
            (
                not of_texts and (self.dataset != "parquet" or self.image_column is not None),
                "image_size",
                "images",
            ),
            (self.dataset == "parquet", "image_column", "--dataset parquet"),
            (self.dataset == "parquet", "lanes", "--dataset parquet"),
            (self.dataset == "text", "text_column", "--dataset text"),
            (self.dataset in ("text", "parquet"), "label_column", "--dataset text or parquet"),
            (of_texts, "tokenizer", "texts"),
            (of_texts and self.tokenizer in TOKENIZERS, "vocab_size", f"--tokenizer {' or '.join(TOKENIZERS)}"),
            (of_texts, "max_length", "texts"),
            (self.model in TEXT_MODELS, "embedding_size", "a text model"),
            (self.model in TEXT_MODELS, "hidden_size", "a text model"),
            (self.model in TEXT_MODELS, "dropout", "a text model"),
            (self.model == "text-lstm", "bidirectional", "--model text-lstm"),
            (self.model == "text-transformer", "num_layers", "--model text-transformer"),
            (self.model == "text-transformer", "num_heads", "--model text-transformer"),
        ):
            value = getattr(self, name)
            if value != Config.model_fields[name].default and not applies:
                raise BadInput(f"{flag(name)} {value} has an effect only with {where}: leave it out")
        self._sampler_has_what_it_needs()
        if of_texts:
            self._texts_are_for_text_models()
        elif self.model in TEXT_MODELS and self.dataset in DATASETS:
            raise BadInput(
                f"--model {self.model} reads texts, and --dataset {self.dataset} has images: change one of them"
            )
        skips = self.dataset == "image-folder" or self.image_column is not None or CALLABLE.fullmatch(self.dataset)
        if self.max_bad_samples and not skips:
            raise BadInput(
                f"--max-bad-samples {self.max_bad_samples} has an effect only with --dataset image-folder, "
                "--image-column or data of your own: leave it out"
            )
        if self.weights is not None and not is_weights_path(self.weights) and not self._is_from_torchvision():
            raise BadInput(
                f"--weights {self.weights}: allowed for --model {self.model} are files ({', '.join(WEIGHTS_SUFFIXES)}) "
                "and the path of a run or a checkpoint, such as runs/NAME; only torchvision's models have weights "
                "with a name"
            )
        if self.batch_size < self.max_workers:
            raise BadInput(
                f"--batch-size {self.batch_size} is less than --num-workers {self.num_workers}: the batch is shared "
                "out over the workers, so each needs at least one sample; raise the one or lower the other"
            )
        if self.sync_batchnorm and self.device == "cpu":
            raise BadInput("--sync-batchnorm needs GPUs, and --device is cpu: leave one of the two out")
        if self.mixup and self.cutmix:
            raise BadInput(f"--mixup {self.mixup} and --cutmix {self.cutmix} exclude each other: set one of them to 0")
        if self.dataset == "image-folder" and self.data_dir is None:
            raise BadInput("--dataset image-folder needs --data-dir, the folder with a subfolder for each class")
        if self.dataset == "text" and self.data_dir is None:
            raise BadInput(
                "--dataset text needs --data-dir, a table or a folder with tables called train, val and test"
            )
        if self.dataset == "parquet":
            self._streams_in_order()
        return self

    def _streams_in_order(self) -> None:
        if self.data_dir is None:
            raise BadInput("--dataset parquet needs --data-dir, a folder or a URI with folders train and val")
        if self.sampler not in ("shuffled", "sequential"):
            raise BadInput(
                f"--sampler {self.sampler} takes samples from anywhere, and --dataset parquet is read a row group at a "
                "time: use shuffled or sequential"
            )
        if self.image_column is None and (self.augment not in ("auto", "none") or self.mixup or self.cutmix):
            raise BadInput("--augment, --mixup and --cutmix change images: give --image-column, or leave them out")

    def _texts_are_for_text_models(self) -> None:
        from app.models.names import TEXT_MODELS

        if self.model not in TEXT_MODELS and not CALLABLE.fullmatch(self.model):
            raise BadInput(
                f"--model {self.model} reads images, and --dataset {self.dataset} has texts: "
                f"use {', '.join(TEXT_MODELS)} or a model of your own"
            )
        for name, usual in (("augment", ("auto", "none")), ("mixup", (0,)), ("cutmix", (0,))):
            value = getattr(self, name)
            if value not in usual:
                raise BadInput(
                    f"{flag(name)} {value} changes images, and --dataset {self.dataset} has texts: leave it out"
                )
        if self.text_column == self.label_column:
            raise BadInput(f"--text-column and --label-column are both {self.text_column}: they are two columns")
        if self.model == "text-transformer" and self.embedding_size % self.num_heads:
            raise BadInput(
                f"--embedding-size {self.embedding_size} must be a multiple of --num-heads {self.num_heads}, "
                "which share it"
            )

    def _sampler_has_what_it_needs(self) -> None:
        """As far as it can be known without the data; sampling.build_order() sees to the rest."""
        if self.sampler == "subset" and self.subset_fraction is None and self.subset_file is None:
            raise BadInput("--sampler subset needs --subset-fraction or --subset-file, which say what part")
        own = CALLABLE.fullmatch(self.dataset) is not None
        needs = {"weighted": "weights", "length-bucketed": "lengths", "aspect-grouped": "shapes"}.get(self.sampler)
        having = {
            "weights": ("image-folder", "text"),
            "lengths": TEXT_DATASETS,
            "shapes": ("image-folder",),
        }
        if needs and not own and self.dataset not in having[needs]:
            have = f"{', '.join(having[needs])} and data of your own have"
            raise BadInput(
                f"--sampler {self.sampler} goes by the {needs} of the samples, which {have} "
                f"and --dataset {self.dataset} has not; use another sampler"
            )
        if needs == "weights" and not own and self.weight_column is None:
            raise BadInput(
                "--sampler weighted needs --weight-column, a column of the table, or of the image folder's metadata.csv"
            )


def _range_of(workers: int | str) -> tuple[int, int]:
    """MIN and MAX of num_workers; (0, 0) for words that are neither a number nor a range."""
    if isinstance(workers, int):
        return workers, workers
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", workers)
    return (int(match[1]), int(match[2] or match[1])) if match else (0, 0)


def is_weights_file(path: str) -> bool:
    """Whether the path is that of a file with weights alone, whether it is there or not."""
    return path.endswith(WEIGHTS_SUFFIXES) and not os.path.isdir(path)


def is_weights_path(weights: str) -> bool:
    """Whether --weights names a file or a folder rather than one of torchvision's weights."""
    return weights.endswith(WEIGHTS_SUFFIXES) or "/" in weights or os.path.isdir(weights)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def effect_of(field: str) -> Effect:
    extra = Config.model_fields[field].json_schema_extra
    assert isinstance(extra, dict)
    return extra["effect"]  # type: ignore[return-value]  # written by setting(), which takes an Effect


def group_of(field: str) -> str:
    extra = Config.model_fields[field].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


def did_you_mean(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def explain(detail: ErrorDetails) -> str:
    """One of pydantic's errors in our words: the flag, the value and what is allowed."""
    field, value, context = str(detail["loc"][0]), detail["input"], detail.get("ctx", {})
    if field in REPLACED:
        return f"{field} is no setting any more: {REPLACED[field]}"
    if detail["type"] == "extra_forbidden":
        return f"{field} is no setting{did_you_mean(field, Config.model_fields)} (--help lists them)"
    allowed = {
        "greater_than": lambda: f"must be greater than {context['gt']}",
        "greater_than_equal": lambda: f"must be at least {context['ge']}",
        "less_than": lambda: f"must be less than {context['lt']}",
        "less_than_equal": lambda: f"must be at most {context['le']}",
        "literal_error": lambda: f"allowed are {context['expected']}",
        "value_error": lambda: str(context["error"]),
    }.get(detail["type"], lambda: detail["msg"][0].lower() + detail["msg"][1:])()
    return f"{flag(field)} {value!r}: {allowed}" if isinstance(value, str) else f"{flag(field)} {value}: {allowed}"
