// Package inside holds tests that run in the guest of test/qemuguest: a cluster of one replica and one worker on a machine
// with cgroup v2 alone, where the daemons have every capability. They are built with the tag guest.
package inside
