"""What similarity is measured on: flat numbers per sample, or their leading principal components."""

from __future__ import annotations

import numpy as np

_WIDEST = 4096  # eigenvectors of a larger covariance take minutes and gigabytes
_ROWS = 4096


def flat_features(values: np.ndarray, what: str = "The features") -> np.ndarray:
    """Samples as rows of float32, whatever their shape; refuses what is not a finite number."""
    values = np.asarray(values)
    if values.ndim == 0 or values.dtype.kind not in "iufb":
        raise TypeError(f"{what} are {values.dtype} of shape {values.shape}; expected numbers, one row per sample.")
    flat_DxF = np.ascontiguousarray(values.reshape(len(values), -1), np.float32)
    finite_D = np.isfinite(flat_DxF.sum(axis=1, dtype=np.float64))
    if not finite_D.all():
        raise ValueError(f"{what} of sample {int(np.argmin(finite_D))} hold NaN or infinity. Repair or remove it.")
    return flat_DxF


def principal_components(features_DxF: np.ndarray, components: int) -> np.ndarray:
    """The samples about their mean, projected onto the directions of largest variance: float32 [D, components]."""
    width = features_DxF.shape[1]
    if components < 1:
        raise ValueError(f"{components} principal components were asked for; expected at least 1.")
    if width > _WIDEST:
        raise ValueError(
            f"Samples of {width:,} numbers are too wide for principal components (at most {_WIDEST:,}). Give an "
            "embedding function, for instance the last hidden layer of a partly trained model."
        )
    mean_F, covariance_FxF = moments(features_DxF)
    _, directions_FxF = np.linalg.eigh(covariance_FxF)
    leading_FxC = directions_FxF[:, ::-1][:, :components]
    out_DxC = np.empty((len(features_DxF), leading_FxC.shape[1]), np.float32)
    for lo in range(0, len(out_DxC), _ROWS):
        out_DxC[lo : lo + _ROWS] = (features_DxF[lo : lo + _ROWS] - mean_F) @ leading_FxC
    return out_DxC


def moments(features_DxF: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance (divided by the number of samples) in float64, a few thousand rows at a time."""
    mean_F = features_DxF.mean(axis=0, dtype=np.float64)
    covariance_FxF = np.zeros((len(mean_F), len(mean_F)))
    for lo in range(0, len(features_DxF), _ROWS):
        x_RxF = features_DxF[lo : lo + _ROWS] - mean_F
        covariance_FxF += x_RxF.T @ x_RxF
    return mean_F, covariance_FxF / len(features_DxF)
