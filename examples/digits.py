"""Train a classifier of handwritten digits on 13 workers, 3 of which are Byzantine, with byzpg's rules and optax.

Run it with `pip install scikit-learn`, then `python examples/digits.py`. It takes a few seconds.
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

from byzpg.robust import NNM, Mean, TrimmedMean, optax_aggregator

WORKERS, BYZANTINE = 13, 3
images, labels = (jnp.asarray(each) for each in load_digits(return_X_y=True))
images = jax.random.permutation(jax.random.key(0), images.astype(jnp.float32) / 16)
labels = jax.random.permutation(jax.random.key(0), labels)
train = [each[:1495].reshape(WORKERS, 115, *each.shape[1:]) for each in (images, labels)]  # 115 images per worker


def logits(parameters, images):
    return jax.nn.relu(images @ parameters["first"]) @ parameters["last"]


def loss(parameters, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(parameters, images), labels).mean()


for rule in (Mean(), NNM(TrimmedMean())):
    parameters = {"first": (64, 32), "last": (32, 10)}
    parameters = {name: 0.2 * jax.random.normal(jax.random.key(1), shape) for name, shape in parameters.items()}
    optimizer = optax.chain(optax_aggregator(rule, num_byzantine=BYZANTINE), optax.adam(0.01))

    @jax.jit
    def step(parameters, state, optimizer=optimizer):
        gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(parameters, *train)  # one per worker
        gradients = jax.tree.map(lambda each: each.at[-BYZANTINE:].multiply(-10), gradients)  # the attack
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = optimizer.init(parameters)
    for _ in range(150):
        parameters, state = step(parameters, state)
    accuracy = jnp.mean(jnp.argmax(logits(parameters, images[1495:]), axis=1) == labels[1495:])
    print(f"{rule}: {accuracy:.0%} of the other images are recognized")
