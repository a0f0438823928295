// Package saturate calculates without overflow: a result that does not fit becomes the largest or
// smallest int64.
package saturate

import (
	"math"
	"math/bits"
)

// Add returns a + b, or the nearest int64 if the sum does not fit.
func Add(a, b int64) int64 {
	switch sum := a + b; {
	case a > 0 && b > 0 && sum <= 0:
		return math.MaxInt64
	case a < 0 && b < 0 && sum >= 0:
		return math.MinInt64
	default:
		return sum
	}
}

// Sub returns a - b, or the nearest int64 if the difference does not fit.
func Sub(a, b int64) int64 {
	switch diff := a - b; {
	case a >= 0 && b < 0 && diff < 0:
		return math.MaxInt64
	case a < 0 && b > 0 && diff >= 0:
		return math.MinInt64
	default:
		return diff
	}
}

// Mul returns a * b, or the nearest int64 if the product does not fit.
func Mul(a, b int64) int64 {
	high, low := bits.Mul64(absolute(a), absolute(b))
	negative := (a < 0) != (b < 0)
	switch {
	case negative && (high > 0 || low >= 1<<63):
		return math.MinInt64
	case negative:
		return -int64(low)
	case high > 0 || low >= 1<<63:
		return math.MaxInt64
	}
	return int64(low)
}

// MulDiv returns a * b / c, rounded toward zero, or math.MaxInt64 if the result does not fit. The
// product a * b need not fit into an int64. a and b must not be negative and c must be positive.
func MulDiv(a, b, c int64) int64 {
	high, low := bits.Mul64(uint64(max(a, 0)), uint64(max(b, 0)))
	if c <= 0 || high >= uint64(c) {
		return math.MaxInt64
	}
	if out, _ := bits.Div64(high, low, uint64(c)); out <= math.MaxInt64 {
		return int64(out)
	}
	return math.MaxInt64
}

func absolute(a int64) uint64 {
	if a < 0 {
		return -uint64(a)
	}
	return uint64(a)
}

// Quantity contains the methods of resource.Quantity that this package uses.
type Quantity interface {
	CmpInt64(int64) int
	Value() int64
	MilliValue() int64
}

// Value returns the value of q as an int64, rounded up to an integer. If the value does not fit, it
// returns the largest or smallest int64. In that case, q.Value() would return a wrong number, such
// as 0.
func Value(q Quantity) int64 {
	switch {
	case q.CmpInt64(math.MaxInt64) >= 0:
		return math.MaxInt64
	case q.CmpInt64(math.MinInt64) <= 0:
		return math.MinInt64
	}
	return q.Value()
}

// MilliValue returns 1000 times the value of q as an int64, rounded up to an integer. If the result
// does not fit, it returns the largest or smallest int64.
func MilliValue(q Quantity) int64 {
	switch {
	case q.CmpInt64(math.MaxInt64/1000) > 0:
		return math.MaxInt64
	case q.CmpInt64(math.MinInt64/1000) < 0:
		return math.MinInt64
	}
	return q.MilliValue()
}
