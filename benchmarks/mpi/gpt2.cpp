// A pipeline without its compute: activations go forward, all microbatches, then back; then each stage's gradients are
// reduced over its replicas, a layer after the other.
#include "rounds.hpp"

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {{"layers", {8}},
                                 {"stages", {2}},
                                 {"microbatches", {8}},
                                 {"activation", {808960}},
                                 {"first", {85317120}},
                                 {"layer", {19677440}},
                                 {"last", {84008960}}});
  MPI_Init(&argc, &argv);
  int rank, ranks;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int stages = flags.number("stages"), replicas = ranks / stages, stage = rank / replicas;
  const int layers = flags.number("layers"), depth = layers / stages, n = flags.number("activation");
  if (replicas * stages != ranks || depth * stages != layers) {
    std::fprintf(stderr, "stages divide the ranks, and the layers\n");
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  MPI_Comm same;
  MPI_Comm_split(MPI_COMM_WORLD, stage, rank, &same);
  std::vector<int> sizes;
  for (int k = stage * depth; k < (stage + 1) * depth && replicas > 1; ++k)
    sizes.push_back(flags.number(k == 0 ? "first" : k == layers - 1 ? "last" : "layer"));
  const int most = sizes.empty() ? 0 : *std::max_element(sizes.begin(), sizes.end());
  auto given = zeros(n), taken = zeros(n), gradients = zeros(most), sums = zeros(most);
  const auto pass = [&](int from, int to) {
    for (int k = 0; k < flags.number("microbatches"); ++k) {
      if (from >= 0 && from < ranks) MPI_Recv(taken.data(), n, MPI_FLOAT, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
      if (to >= 0 && to < ranks) MPI_Send(given.data(), n, MPI_FLOAT, to, 0, MPI_COMM_WORLD);
    }
  };
  timed(flags, [&] {
    pass(rank - replicas, rank + replicas);
    pass(rank + replicas, rank - replicas);
    for (const int size : sizes) MPI_Allreduce(gradients.data(), sums.data(), size, MPI_FLOAT, MPI_SUM, same);
  });
  MPI_Finalize();
}
