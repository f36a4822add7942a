"""Which parameters of a guide and its model belong together."""

import jax

from numpyro_sgp.tracing import messages
from numpyro_sgp.tracing.rows import origins

#: The groups of :func:`parameter_blocks`.
GROUPS = ("variational", "inducing", "kernel", "likelihood", "other")


def parameter_blocks(guide, params: dict, *args, **kwargs) -> dict[str, list[str]]:
    """
    Groups the parameters of an :class:`~numpyro_sgp.AutoSparseGP` and its model, for an
    optimiser that takes one block after another [1, section 8].

    What a parameter is for is read off the model: the program is traced (nothing is
    computed), and a parameter counts as the kernel's where the covariance, mean or inputs
    of a GP site depend on it in any way. A parameter that both a GP site and the
    likelihood depend on (of an ``AutoMultivariateNormal`` over all latents, say) is the
    kernel's.

    :param guide: the guide, set up.
    :param params: parameters by name, such as ``svi.get_params(state)``.
    :param args: arguments of the model; those of the set-up if left out.
    :return: names of parameters by group, in the order of ``params``:
        ``"variational"``, the q(u) of GP sites; ``"inducing"``, their inducing points;
        ``"kernel"``, what the priors of GP sites depend on (of a base guide also);
        ``"likelihood"``, what the rest of the model depends on; and ``"other"``, what
        only the priors of latents beside f depend on, or nothing. Groups may be empty.
    :raises ValueError: if the guide is not set up, or ``params`` are not this guide's.

    **References:**

    1. Bonilla, Krauth, Dezfouli (2018). Generic inference in latent Gaussian process
       models. https://arxiv.org/abs/1609.00577

    >>> import jax.numpy as jnp, numpyro
    >>> import numpyro.distributions as dist
    >>> import numpyro_sgp as sgp
    >>> from numpyro_sgp.guides.parameters import parameter_blocks
    >>> def model(X, y=None):
    ...     lengthscale, noise = numpyro.param("ell", 1.0), numpyro.param("noise", 0.1)
    ...     kernel = sgp.kernels.RBF(1.0, lengthscale)
    ...     f = numpyro.sample("f", sgp.GaussianProcess(kernel, X))
    ...     numpyro.sample("y", dist.Normal(f, noise).to_event(1), obs=y)
    >>> X = jnp.linspace(0.0, 1.0, 5)[:, None]
    >>> guide = sgp.AutoSparseGP(model, sgp.SVGP(2))
    >>> guide.setup(X, jnp.ones(5))
    >>> params = {"ell": 1.0, "noise": 0.1, "f_auto_Z": X[:2]}
    >>> params |= {"f_auto_qu_mu": jnp.zeros(2), "f_auto_qu_sqrt": jnp.eye(2)}
    >>> for group, names in parameter_blocks(guide, params, X, jnp.ones(5)).items():
    ...     print(group, names)
    variational ['f_auto_qu_mu', 'f_auto_qu_sqrt']
    inducing ['f_auto_Z']
    kernel ['ell']
    likelihood ['noise']
    other []
    """
    guide.check_params(params)
    args, kwargs = guide._default_args(args, kwargs)
    blocks = {group: [] for group in GROUPS}
    own = guide.roles()
    rest = [name for name in params if name not in own]
    prior, likelihood = _used(guide, params, rest, args, kwargs)
    for name in params:
        if name in own:
            group = own[name]
        elif name in prior:
            group = "kernel"
        else:
            group = "likelihood" if name in likelihood else "other"
        blocks[group].append(name)
    return blocks


def _used(guide, params, names, args, kwargs):
    """Which of ``names`` the priors of GP sites depend on, and which the rest does."""

    def run(values):
        """What the GP sites are, and what is scored beside them and the latents."""
        given = {**params, **values}
        priors, key = [], jax.random.key(0)

        def at_site(site):
            priors.append(messages.unwrap(site["fn"])[0])
            return messages.at_prior_mean(site)

        latents = guide.others_at(given, args, kwargs, key)
        trace = messages.trace_of(
            guide.model, args, kwargs, key, data={**given, **latents}, at_site=at_site
        )
        own = {*guide.known().latents, *guide.approximations}
        scores = [
            messages.log_prob(site)
            for name, site in trace.items()
            if site["type"] == "sample" and name not in own
        ]
        some = [prior.X[..., :2, :] for prior in priors]
        covariances = [prior.kernel(X, X) for prior, X in zip(priors, some, strict=True)]
        moments = [(prior.X, prior.mean) for prior in priors]
        return {"priors": [covariances, moments], "scores": scores}

    found = origins(run, {name: params[name] for name in names})
    return found["priors"], found["scores"]
