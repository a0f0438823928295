// Package await makes tests wait for a condition. All waits have one policy: a limit that grows
// with the slowness of the machine, and a failure that prints the last state that the test has
// observed.
package await

import (
	"context"
	"crypto/sha256"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// Patience is the limit of a wait that needs no other limit. A wait that succeeds does not take
// longer because of it, so it is chosen for the worst case.
const Patience = time.Minute

const (
	// referenceTime is how long the calibration takes on the machine for which limits are written.
	referenceTime = 20 * time.Millisecond
	maxSlowness   = 8
)

// Until calls condition once in each interval until it returns nil. It fails the test if ctx ends
// first, or if the limit has passed, multiplied as by Scale. The failure contains the text what and
// the last error of condition, which should therefore describe the observed state. Until must be
// called from the goroutine of the test.
func Until(ctx context.Context, t testing.TB, limit, interval time.Duration, what string, condition func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, Scale(limit))
	defer cancel()
	began := time.Now()
	if err := wait.For(ctx, interval, condition); err != nil {
		t.Fatalf("%s: not within %s: %v", what, time.Since(began).Round(time.Millisecond), err)
	}
}

// Scale returns the limit multiplied by the slowness of the machine, a factor from 1 to 8. The
// slowness is measured once per process. In a synctest bubble it is 1.
func Scale(limit time.Duration) time.Duration { return time.Duration(float64(limit) * slowness()) }

var slowness = sync.OnceValue(func() float64 {
	began := time.Now()
	block := make([]byte, 64<<10)
	for range 128 {
		sum := sha256.Sum256(block)
		copy(block, sum[:])
	}
	return slownessOf(time.Since(began))
})

// slownessOf returns the slowness of a machine on which the calibration takes the given time, as a
// factor from 1 to maxSlowness.
func slownessOf(calibration time.Duration) float64 {
	return min(max(1, float64(calibration)/float64(referenceTime)), maxSlowness)
}
