"""A network of your own, from training to samples: an MLP on points in the plane, with an NPR head beside the noise."""

import torch
from torch import Tensor, nn

import optcov

schedule = optcov.Schedule.linear()
forward = optcov.ForwardProcess(schedule)


def ring(count: int, generator: torch.Generator) -> Tensor:
    """Points near a circle, (count, 2)."""
    angle = 2 * torch.pi * torch.rand(count, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2, generator=generator)


class Network(nn.Module):
    """Predicts noise (B, 2), and from the same features the squared error of that prediction (B, 2)."""

    def __init__(self, width: int = 96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.noise = nn.Linear(width, 2)
        self.log_error = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x_t: Tensor, t: float | Tensor) -> optcov.NoisePrediction:
        level = schedule.log_snr(t).float().expand(len(x_t)).unsqueeze(1) / 4
        features = self.body(torch.cat([x_t, level], 1))
        return optcov.NoisePrediction(self.noise(features), {"npr": self.log_error(features.detach()).exp()})


def main(steps: int = 1000) -> None:
    """Train mean and head together (Eqs. 7 and 15), then sample and score."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        x_0, t = ring(256, generator), torch.randint(1, 1001, (256,), generator=generator)
        noise = torch.randn(x_0.shape, generator=generator)
        prediction = network(forward.diffuse(x_0, t, noise).float(), t)
        residual, estimate = (noise - prediction.noise).square(), prediction.heads["npr"]
        loss = residual.mean() + (residual.detach() / estimate + estimate.log()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    test, trajectory = ring(1000, generator), optcov.Trajectory.even(schedule, 20)
    for covariance in ("beta_tilde", "beta", "npr"):
        process = optcov.ReverseProcess(network.eval(), forward, covariance, data_range=None)
        bits = optcov.elbo(process, test, trajectory, last_variance="own").bits_per_dim().mean()
        radius = optcov.sample(process, trajectory, shape=(1000, 2), last_step="draw").norm(dim=1)
        print(f"{covariance:10} {bits:8.2f} bits/dim, radius {radius.mean():.2f} ± {radius.std():.2f}")
    print(f"{'the data':10} {'':17} radius {test.norm(dim=1).mean():.2f} ± {test.norm(dim=1).std():.2f}")


if __name__ == "__main__":
    main()
