package lrucache

import "testing"

// Values that are used stay cached, others are dropped.
func TestUsedValuesStay(t *testing.T) {
	in := New(10)
	made := map[int]int{}
	value := func(i int) func() (int, error) {
		return Memoize(in, func() (int, int64, error) { made[i]++; return i, 4, nil })
	}
	often := value(0)
	for i := 1; i < 20; i++ {
		if _, err := often(); err != nil {
			t.Fatal(err)
		}
		if got, err := value(i)(); got != i || err != nil {
			t.Fatal(got, err)
		}
	}
	if made[0] > 2 {
		t.Errorf("a value that is used all the time was computed %d times", made[0])
	}
}
