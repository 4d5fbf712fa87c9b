// How many runs share a machine.
#include "reproduce/room.h"

#include <gtest/gtest.h>

namespace sinkhorn::reproduce {
namespace {

constexpr int64_t kGib = int64_t{1} << 30;

TEST(MostAtOnce, FollowsTheCores) {
  EXPECT_EQ(most_at_once(true, "small", 16), 8);
  EXPECT_EQ(most_at_once(true, "small", 8), 4);
  EXPECT_EQ(most_at_once(true, "full", 1), 1);
  EXPECT_EQ(most_at_once(true, "small", 200), 8);
  EXPECT_EQ(most_at_once(false, "smoke", 2), 2);
  EXPECT_EQ(most_at_once(false, "smoke", 0), 1);  // not known
  EXPECT_EQ(most_at_once(false, "small", 16), 1);
}

TEST(HasRoom, WaitsUntilOneTrains) {
  EXPECT_FALSE(has_room({.free_before = 80 * kGib, .free_now = 79 * kGib, .starting = 1}));
  EXPECT_TRUE(has_room({.free_before = 80 * kGib, .free_now = 70 * kGib, .training = 1}));
}

TEST(HasRoom, KeepsWhatRunsTakeAndSomeToSpare) {
  // One run took 10 GiB: another needs 15.
  EXPECT_TRUE(has_room({.free_before = 25 * kGib, .free_now = 15 * kGib, .training = 1}));
  EXPECT_FALSE(has_room({.free_before = 24 * kGib, .free_now = 14 * kGib, .training = 1}));
  // What has begun will take as much.
  EXPECT_FALSE(
      has_room({.free_before = 35 * kGib, .free_now = 25 * kGib, .starting = 1, .training = 1}));
  EXPECT_TRUE(
      has_room({.free_before = 40 * kGib, .free_now = 30 * kGib, .starting = 1, .training = 1}));
  // Runs on the CPU beside a GPU take nothing of it; another's that ended leave more than before.
  EXPECT_TRUE(has_room({.free_before = kGib, .free_now = kGib, .training = 1}));
  EXPECT_TRUE(has_room({.free_before = kGib, .free_now = 2 * kGib, .training = 1}));
}

}  // namespace
}  // namespace sinkhorn::reproduce
