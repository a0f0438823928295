// Package reservedspace says how much of a disk, or of memory, has to stay free: a share of it, or a size.
package reservedspace

import (
	"fmt"
	"strconv"
	"strings"
)

// Amount is what stays free. The zero value is Default, which is a disk's.
type Amount struct {
	percent int64
	bytes   int64
}

// Default is a tenth, as Kubernetes has it.
var Default = Percent(10)

// Percent is a share of a disk, 1 to 99.
func Percent(n int64) Amount { return Amount{percent: n} }

// Bytes is a size, above zero.
func Bytes(n int64) Amount { return Amount{bytes: n} }

// Parse reads a share, such as 10%, or whole bytes with one of the units Ki, Mi, Gi and Ti or none, such as 2Gi.
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
	return Amount{}, fmt.Errorf("%q: want a share of the disk, such as 10%%, or a size, such as 2Gi", text)
}

var units = []string{"Ki", "Mi", "Gi", "Ti"}

// BytesOf is what stays free of a disk of so many bytes.
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

// CountOf is what stays free of so many things that are no bytes, inodes say: of those a size says nothing.
func (f Amount) CountOf(total int64) int64 {
	if f.bytes > 0 {
		return 0
	}
	return f.BytesOf(total)
}

// Half is half of it.
func (f Amount) Half() Amount {
	if f == (Amount{}) {
		f = Default
	}
	return Amount{percent: (f.percent + 1) / 2, bytes: (f.bytes + 1) / 2}
}

// String is how Parse reads it.
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
