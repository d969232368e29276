// A recommender: tables exchange rows by all-to-alls, and gradients of two MLPs are reduced while others are computed.
#include "rounds.hpp"

int main(int argc, char** argv) {
  const Flags flags(argc, argv, {{"alltoall", {262144}},
                                 {"top", {728065}},
                                 {"bottom", {49536}},
                                 {"forward", {95, 341, 209, 455}},
                                 {"backward", {910, 209, 682, 190}}});
  MPI_Init(&argc, &argv);
  int ranks;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const Compute compute(flags.number("poll") != 0);
  const auto &forward = flags.list("forward"), &backward = flags.list("backward");
  const int part = flags.number("alltoall") / ranks, sizes[2] = {flags.number("top"), flags.number("bottom")};
  auto rows = zeros(part * ranks), others = zeros(part * ranks);
  std::vector<float> gradients[2] = {zeros(sizes[0]), zeros(sizes[1])};
  std::vector<float> sums[2] = {zeros(sizes[0]), zeros(sizes[1])};
  MPI_Request reductions[2];
  const auto exchange = [&] {
    MPI_Alltoall(rows.data(), part, MPI_FLOAT, others.data(), part, MPI_FLOAT, MPI_COMM_WORLD);
  };
  const auto reduce = [&](int k) {
    MPI_Iallreduce(gradients[k].data(), sums[k].data(), sizes[k], MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &reductions[k]);
  };
  timed(flags, [&] {
    compute(forward[0]);
    exchange();
    for (size_t k = 1; k < forward.size(); ++k) compute(forward[k]);
    compute(backward[0]);
    reduce(0);
    compute(backward[1]);
    compute(backward[2]);
    reduce(1);
    exchange();
    compute(backward[3]);
    MPI_Waitall(2, reductions, MPI_STATUSES_IGNORE);
  });
  MPI_Finalize();
}
