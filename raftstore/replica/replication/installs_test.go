package replication

import (
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// While a follower takes in a snapshot, and until it can have fetched the rest,
// the log may become longer: else it would be sent one snapshot after the other.
func TestInstallsStretchTheLog(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var i Installs
		want := func(when string, n int64) {
			t.Helper()
			if got := i.LogFactor(); got != n {
				t.Errorf("%s: %d times as long, want %d", when, got, n)
			}
		}
		want("before", 1)
		i.startInstall()
		i.startInstall()
		i.endInstall()
		time.Sleep(2 * afterInstall)
		want("while one of two is under way", duringInstall)
		i.endInstall()
		want("just after", duringInstall)
		time.Sleep(afterInstall)
		want("later", 1)
	})
}
