// Package inside has the tests that run in the guest of test/qemuguest: a cluster of one replica
// and one worker. The guest has cgroup v2 alone, and the daemons have every capability. The tests
// are built with the tag guest.
package inside
