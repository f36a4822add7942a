"""
Worker of GPyTorch: ApproximateGP with VariationalStrategy (whitened, Cholesky factors in
double precision, both by default), or OrthogonallyDecoupledVariationalStrategy, and
VariationalELBO; PyTorch as it comes, without compilation.
"""

import time

begin = time.perf_counter()
import gpytorch  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpytorch import variational  # noqa: E402

IMPORT_S = time.perf_counter() - begin

from serve import serve  # noqa: E402


class GP(gpytorch.models.ApproximateGP):
    """As the library's documentation has it."""

    def __init__(self, problem):
        Z = torch.as_tensor(problem.Z)
        q = variational.CholeskyVariationalDistribution(len(Z))
        strategy = variational.VariationalStrategy(self, Z, q)
        if problem.method == "ODVGP":
            O = torch.as_tensor(problem.O)
            strategy = variational.OrthogonallyDecoupledVariationalStrategy(
                strategy, O, variational.DeltaVariationalDistribution(len(O))
            )
        super().__init__(strategy)
        self.mean_module = gpytorch.means.ZeroMean()
        kernel = gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=problem.D)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
        self.covar_module.outputscale = 1.0
        kernel.lengthscale = problem.lengthscale

    def forward(self, X):
        """The prior."""
        return gpytorch.distributions.MultivariateNormal(
            self.mean_module(X), self.covar_module(X)
        )


class Model:
    """SVGP or ODVGP trained by Adam."""

    def __init__(self, problem):
        torch.set_default_dtype(getattr(torch, problem.dtype))
        self.X, self.y = torch.as_tensor(problem.X), torch.as_tensor(problem.y)
        self.model = GP(problem)
        if problem.likelihood == "gaussian":
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
            self.likelihood.noise = problem.noise
        else:
            self.likelihood = gpytorch.likelihoods.BernoulliLikelihood()
        parameters = [*self.model.parameters(), *self.likelihood.parameters()]
        self.optimiser = torch.optim.Adam(parameters, lr=problem.rate)
        self.bound = gpytorch.mlls.VariationalELBO(
            self.likelihood, self.model, num_data=problem.N
        )

    def steps(self, rows):
        """Trains; the last loss."""
        self.model.train()
        self.likelihood.train()
        for some in torch.as_tensor(np.asarray(rows, np.int64)):
            self.optimiser.zero_grad()
            loss = -self.bound(self.model(self.X[some]), self.y[some])
            loss.backward()
            self.optimiser.step()
        return loss.item()

    def predict(self, X):
        """Mean and variance of f."""
        if self.model.training:
            self.model.eval()
        with torch.no_grad():
            q = self.model(torch.as_tensor(X))
            return q.mean.numpy(), q.variance.numpy()

    def noise_variance(self):
        """Of the Gaussian likelihood."""
        return getattr(self.likelihood, "noise", torch.tensor(np.nan)).item()


if __name__ == "__main__":
    serve(Model, IMPORT_S)
