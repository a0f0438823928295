// Package backoff computes growing delays.
package backoff

import (
	"math/rand/v2"
	"time"
)

// Backoff doubles from Min to Max. Jitter is the fraction (0 to 1) of a delay
// that is drawn at random. The zero value of the counter starts at Min.
type Backoff struct {
	Min, Max time.Duration
	Jitter   float64
	n        int
}

// Next returns the delay before the next attempt and increases the following delay.
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

// Reset makes the next delay start at Min again.
func (b *Backoff) Reset() { b.n = 0 }
