// A convolutional network over volumes, split along two axes: faces go to a neighbour along each before a convolution,
// dense layers gather and scatter, and gradients are reduced while those of earlier layers are computed.
#include "rounds.hpp"

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {{"dp", {1}},
                                 {"h", {2}},
                                 {"w", {2}},
                                 {"forward", {6567, 13135, 6567, 3283, 1641, 5, 3, 1}},
                                 {"backward", {2, 6, 10, 3283, 6567, 13135, 26270, 13135}},
                                 {"halos", {2097152, 1048576, 524288, 262144}},
                                 {"backward_halos", {131072, 262144, 524288, 1048576}},
                                 {"gathers", {65536, 256, 128}},
                                 {"scatters", {128, 256, 65536}},
                                 {"dense", {1050737}},
                                 {"convolutions", {3539456, 884992, 221312, 55360, 3488}}});
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int h = flags.number("h"), w = flags.number("w"), parts = h * w;
  if (ranks != flags.number("dp") * parts || h > 2 || w > 2) {
    std::fprintf(stderr, "expected dp * h * w ranks, h and w at most 2\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm shards, replicas;
  MPI_Comm_split(MPI_COMM_WORLD, rank / parts, rank, &shards);
  MPI_Comm_split(MPI_COMM_WORLD, rank % parts, rank, &replicas);
  const int here = rank % parts;
  std::vector<int> neighbours;
  if (h == 2) neighbours.push_back((here + w) % parts);
  if (w == 2) neighbours.push_back(here ^ 1);

  const Compute compute(flags.number("poll") != 0);
  const auto &gathers = flags.list("gathers"), &scatters = flags.list("scatters");
  long most = 0;
  for (const auto* sizes : {&flags.list("halos"), &flags.list("backward_halos"), &gathers, &scatters})
    for (const long n : *sizes) most = std::max(most, n * parts);
  auto given = zeros(most), taken = zeros(most * 2);
  std::vector<std::vector<float>> gradients = {zeros(flags.number("dense"))}, sums = gradients;
  for (const long n : flags.list("convolutions")) {
    gradients.push_back(zeros(n));
    sums.push_back(zeros(n));
  }
  const auto exchange = [&](long n, std::vector<MPI_Request>& requests) {
    requests.resize(2 * neighbours.size());
    for (size_t k = 0; k < neighbours.size(); ++k) {
      MPI_Irecv(taken.data() + k * n, static_cast<int>(n), MPI_FLOAT, neighbours[k], 0, shards, &requests[2 * k]);
      MPI_Isend(given.data(), static_cast<int>(n), MPI_FLOAT, neighbours[k], 0, shards, &requests[2 * k + 1]);
    }
  };
  const auto wait = [](std::vector<MPI_Request>& requests) {
    MPI_Waitall(static_cast<int>(requests.size()), requests.data(), MPI_STATUSES_IGNORE);
    requests.clear();
  };
  timed(flags, [&] {
    std::vector<MPI_Request> faces, reductions;
    const auto reduce = [&](size_t k, MPI_Comm comm) {
      reductions.emplace_back();
      MPI_Iallreduce(gradients[k].data(), sums[k].data(), static_cast<int>(sums[k].size()), MPI_FLOAT, MPI_SUM, comm,
                     &reductions.back());
    };
    const auto &forward = flags.list("forward"), &backward = flags.list("backward");
    const auto &halos = flags.list("halos"), &backward_halos = flags.list("backward_halos");
    for (size_t k = 0; k < forward.size(); ++k) {
      compute(forward[k]);
      if (k < halos.size()) {
        exchange(halos[k], faces);
        wait(faces);
      } else if (k < halos.size() + gathers.size() && parts > 1) {
        const int n = static_cast<int>(gathers[k - halos.size()]);
        MPI_Allgather(given.data(), n, MPI_FLOAT, taken.data(), n, MPI_FLOAT, shards);
      }
    }
    for (size_t k = 0; k < backward.size(); ++k) {
      compute(backward[k]);
      if (k < scatters.size()) {
        if (parts > 1)
          MPI_Reduce_scatter_block(given.data(), taken.data(), static_cast<int>(scatters[k]), MPI_FLOAT, MPI_SUM, shards);
        if (k + 1 == scatters.size() && flags.number("dp") > 1) reduce(0, replicas);
      } else {
        const size_t layer = k - scatters.size();
        if (layer < backward_halos.size()) exchange(backward_halos[layer], faces);
        reduce(1 + layer, MPI_COMM_WORLD);
        wait(faces);
      }
    }
    wait(reductions);
  });
  MPI_Finalize();
}
