package saturate

import (
	"math"
	"math/big"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"
)

// F95: sums, differences, products and quotients equal those of big integers, clamped to int64.
func TestAgainstLargeIntegers(t *testing.T) {
	numbers := []int64{0, 1, -1, 2, -2, 1000, 1 << 31, 1 << 32, 1 << 62, -1 << 62, math.MaxInt64, math.MinInt64,
		math.MaxInt64 - 1, math.MinInt64 + 1, math.MaxInt64 / 2, math.MaxInt64/2 + 1, math.MaxInt64 / 1000, 3037000500}
	clamp := func(n *big.Int) int64 {
		if n.IsInt64() {
			return n.Int64()
		}
		if n.Sign() > 0 {
			return math.MaxInt64
		}
		return math.MinInt64
	}
	for _, a := range numbers {
		for _, b := range numbers {
			x, y := big.NewInt(a), big.NewInt(b)
			if got, want := Add(a, b), clamp(new(big.Int).Add(x, y)); got != want {
				t.Errorf("%d + %d = %d, not %d", a, b, got, want)
			}
			if got, want := Sub(a, b), clamp(new(big.Int).Sub(x, y)); got != want {
				t.Errorf("%d - %d = %d, not %d", a, b, got, want)
			}
			if got, want := Mul(a, b), clamp(new(big.Int).Mul(x, y)); got != want {
				t.Errorf("%d * %d = %d, not %d", a, b, got, want)
			}
			for _, c := range numbers {
				if a < 0 || b < 0 || c <= 0 {
					continue
				}
				want := clamp(new(big.Int).Quo(new(big.Int).Mul(x, y), big.NewInt(c)))
				if got := MulDiv(a, b, c); got != want {
					t.Errorf("%d * %d / %d = %d, not %d", a, b, c, got, want)
				}
			}
		}
	}
}

// F95: a quantity that does not fit counts as the largest number, not as 0.
func TestQuantities(t *testing.T) {
	for text, want := range map[string]struct{ value, milli int64 }{
		"0": {0, 0}, "100m": {1, 100}, "2": {2, 2000}, "-3": {-3, -3000}, "1.5Gi": {3 << 29, 3 << 29 * 1000},
		"1E": {1e18, math.MaxInt64}, "9223372036854775": {9223372036854775, 9223372036854775000},
		"9223372036854776": {9223372036854776, math.MaxInt64}, "9223372036854775807": {math.MaxInt64, math.MaxInt64},
		"9E": {9e18, math.MaxInt64}, "10E": {math.MaxInt64, math.MaxInt64}, "-10E": {math.MinInt64, math.MinInt64},
		"1e400": {math.MaxInt64, math.MaxInt64},
	} {
		q, err := resource.ParseQuantity(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := Value(&q); got != want.value {
			t.Errorf("%s is %d, not %d", text, got, want.value)
		}
		if got := MilliValue(&q); got != want.milli {
			t.Errorf("%s is %d thousandths, not %d", text, got, want.milli)
		}
	}
}
