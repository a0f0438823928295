// Package tscrate measures how fast this machine's time stamp counter runs. A machine in software (qemu's tcg) shows its guest
// the host's counter, and the guest's kernel finds out how fast it is by comparing it with a timer, in a few milliseconds: on
// a busy host it is wrong by a multiple at times, and then every second of the guest is. Told on its command line, it need not
// find out.
package tscrate

import "time"

// window is how long the counter is watched: what the two ends are apart from the clock's matters less, the longer it is.
const window = 100 * time.Millisecond

// KHz is the counter's frequency in kHz, as Linux' tsc_early_khz= has it; ok is false where there is no such counter, or it
// does not run evenly.
func KHz() (khz int, ok bool) {
	began, from := best()
	if from == 0 {
		return 0, false
	}
	for time.Since(began) < window {
	}
	ended, to := best()
	if to <= from {
		return 0, false
	}
	khz = int(float64(to-from) / float64(ended.Sub(began)) * 1e6)
	return khz, khz > 100_000 && khz < 10_000_000
}

// best reads clock and counter together: of some tries the one that was held up least.
func best() (at time.Time, count uint64) {
	least := time.Hour
	for range 50 {
		before := time.Now()
		n := counter()
		if took := time.Since(before); took < least {
			least, at, count = took, before.Add(took/2), n
		}
	}
	return at, count
}
