// Package reservedspace describes how much of a disk, or of memory, must stay free: a percentage or
// a size.
package reservedspace

import (
	"fmt"
	"strconv"
	"strings"
)

// Amount is the part of a disk or of memory that must stay free. It is either a percentage or a
// size. The zero value means Default.
type Amount struct {
	percent int64
	bytes   int64
}

// Default is the Amount that applies if no Amount is configured: 10 %, as in Kubernetes.
var Default = Percent(10)

// Percent returns the Amount of n percent of the disk; n must be 1 to 99.
func Percent(n int64) Amount { return Amount{percent: n} }

// Bytes returns the Amount of n bytes; n must be positive.
func Bytes(n int64) Amount { return Amount{bytes: n} }

// Parse parses a percentage, such as 10%, or a size in bytes with an optional unit Ki, Mi, Gi or
// Ti, such as 2Gi.
func Parse(text string) (Amount, error) {
	if share, ok := strings.CutSuffix(text, "%"); ok {
		if n, err := strconv.ParseInt(share, 10, 64); err == nil && n >= 1 && n <= 99 {
			return Percent(n), nil
		}
		return Amount{}, fmt.Errorf("%q: want 1%% to 99%%", text)
	}
	number, shift := text, 0
	for i, unit := range units {
		if rest, ok := strings.CutSuffix(text, unit); ok {
			number, shift = rest, 10*(i+1)
		}
	}
	if n, err := strconv.ParseInt(number, 10, 64); err == nil && n >= 1 && n <= 1<<(62-shift) {
		return Bytes(n << shift), nil
	}
	return Amount{}, fmt.Errorf("%q: want a percentage of the disk, such as 10%%, or a size, such as 2Gi", text)
}

var units = []string{"Ki", "Mi", "Gi", "Ti"}

// BytesOf returns how many bytes must stay free on a disk of total bytes.
func (f Amount) BytesOf(total int64) int64 {
	switch {
	case f.bytes > 0:
		return f.bytes
	case f.percent > 0:
		return total / 100 * f.percent
	default:
		return Default.BytesOf(total)
	}
}

// CountOf returns how many units must stay free of a resource that is not counted in bytes, for
// example inodes. total is the number of all units. If the Amount is a size in bytes, CountOf
// returns 0.
func (f Amount) CountOf(total int64) int64 {
	if f.bytes > 0 {
		return 0
	}
	return f.BytesOf(total)
}

// Half returns half of the percentage or size, rounded up.
func (f Amount) Half() Amount {
	if f == (Amount{}) {
		f = Default
	}
	return Amount{percent: (f.percent + 1) / 2, bytes: (f.bytes + 1) / 2}
}

// String returns the text that Parse accepts.
func (f Amount) String() string {
	if f == (Amount{}) {
		f = Default
	}
	if f.bytes == 0 {
		return strconv.FormatInt(f.percent, 10) + "%"
	}
	n, unit := f.bytes, ""
	for _, u := range units {
		if n%1024 != 0 {
			break
		}
		n, unit = n/1024, u
	}
	return strconv.FormatInt(n, 10) + unit
}
