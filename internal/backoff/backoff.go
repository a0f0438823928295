// Package backoff computes exponentially growing delays between attempts.
package backoff

import (
	"math/rand/v2"
	"time"
)

// Backoff computes the delays between attempts. They double from Min to Max. Each delay is
// shortened by a random part, which is at most the fraction Jitter (0 to 1) of the delay.
type Backoff struct {
	Min, Max time.Duration
	Jitter   float64
	n        int
}

// Next returns the delay before the next attempt. The delay after that is twice as long, up to Max.
func (b *Backoff) Next() time.Duration {
	d := b.Min << b.n
	if d >= b.Max || d <= 0 {
		d = b.Max
	} else {
		b.n++
	}
	if b.Jitter > 0 {
		d -= time.Duration(rand.Float64() * b.Jitter * float64(d))
	}
	return d
}

// Reset makes the next delay Min again, after an attempt that succeeded.
func (b *Backoff) Reset() { b.n = 0 }
