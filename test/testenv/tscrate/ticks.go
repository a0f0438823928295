// Package tscrate measures the frequency of this machine's time stamp counter. A virtual machine
// under qemu's TCG exposes the host's counter to its guest. The guest's kernel calibrates it
// against a timer within a few milliseconds. On a busy host the result can be wrong by a multiple,
// and then every second of the guest is. With the frequency on its command line, the kernel skips
// the calibration.
package tscrate

import "time"

// window is the duration of the measurement. A longer window reduces the error of the two readings.
const window = 100 * time.Millisecond

// KHz returns the counter's frequency in kHz, the unit of the kernel parameter tsc_early_khz. ok is
// false if there is no such counter or the result is implausible.
func KHz() (khz int, ok bool) {
	began, from := bestSample()
	if from == 0 {
		return 0, false
	}
	for time.Since(began) < window {
	}
	ended, to := bestSample()
	if to <= from {
		return 0, false
	}
	khz = int(float64(to-from) / float64(ended.Sub(began)) * 1e6)
	return khz, khz > 100_000 && khz < 10_000_000
}

// bestSample reads the clock and the counter together. It returns the attempt with the shortest
// delay between the two readings.
func bestSample() (at time.Time, count uint64) {
	least := time.Hour
	for range 50 {
		before := time.Now()
		n := readCounter()
		if took := time.Since(before); took < least {
			least, at, count = took, before.Add(took/2), n
		}
	}
	return at, count
}
