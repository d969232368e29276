// What the sequences share: flags, compute that is slept, and the loop that times iterations.
//
// Flags are NAME=NUMBER[,NUMBER...], each of which a sequence has a default for. Those of all sequences:
//   iterations, warmup   how often the sequence is timed, and runs before that
//   poll=1               sleeps in short pieces and lets MPI progress between them
#pragma once

#include <mpi.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

using Numbers = std::vector<long>;

class Flags {
 public:
  Flags(int argc, char** argv, std::map<std::string, Numbers> defaults) : values_(std::move(defaults)) {
    values_.insert({{"iterations", {64}}, {"warmup", {8}}, {"poll", {0}}});
    for (int k = 1; k < argc; ++k) {
      const std::string word = argv[k];
      const auto at = word.find('=');
      const auto name = word.substr(0, at);
      if (at == std::string::npos || !values_.count(name)) {
        std::fprintf(stderr, "unknown flag %s\n", word.c_str());
        std::exit(2);
      }
      Numbers found;
      for (const char* c = argv[k] + at + 1; *c != '\0';) {
        char* end = nullptr;
        found.push_back(std::strtol(c, &end, 10));
        if (end == c) {
          std::fprintf(stderr, "%s: expected numbers\n", word.c_str());
          std::exit(2);
        }
        c = *end == ',' ? end + 1 : end;
      }
      values_[name] = found;
    }
  }
  const Numbers& list(const std::string& name) const { return values_.at(name); }
  int number(const std::string& name) const { return static_cast<int>(values_.at(name).at(0)); }

 private:
  std::map<std::string, Numbers> values_;
};

inline double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

inline void nap(double seconds) {
  const timespec t{static_cast<time_t>(seconds), static_cast<long>((seconds - static_cast<time_t>(seconds)) * 1e9)};
  nanosleep(&t, nullptr);
}

// Sleeps to the microsecond: the kernel wakes a process up late, so the last part of a time is spent busy.
class Compute {
 public:
  explicit Compute(bool poll) : poll_(poll) {}
  void operator()(long micros) const {
    const double late = 60e-6, piece = 50e-6, end = now() + 1e-6 * static_cast<double>(micros);
    if (!poll_) {
      if (micros * 1e-6 > late) nap(micros * 1e-6 - late);
    } else {
      for (double left; (left = end - late - now()) > 0;) {
        int found;
        nap(std::min(left, piece));
        MPI_Iprobe(MPI_ANY_SOURCE, 0, MPI_COMM_WORLD, &found, MPI_STATUS_IGNORE);
      }
    }
    while (now() < end) {
    }
  }

 private:
  bool poll_;
};

// Runs the sequence, each time from a barrier, and prints the seconds of its slowest rank, a line an iteration.
inline void timed(const Flags& flags, const std::function<void()>& sequence) {
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int k = -flags.number("warmup"); k < flags.number("iterations"); ++k) {
    MPI_Barrier(MPI_COMM_WORLD);
    const double begin = now();
    sequence();
    double seconds = now() - begin;
    MPI_Reduce(rank == 0 ? MPI_IN_PLACE : &seconds, &seconds, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0 && k >= 0) std::printf("%.9f\n", seconds);
  }
}

inline std::vector<float> zeros(long n) { return std::vector<float>(static_cast<size_t>(n), 0.0f); }
