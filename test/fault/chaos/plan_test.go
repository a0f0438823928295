package chaos

import (
	"testing"
	"time"
)

// A plan follows from its seed, has every fault as often as any other but for one, and about the length that was asked for.
func TestPlan(t *testing.T) {
	for _, d := range []time.Duration{0, 20 * time.Second, 5 * time.Minute} {
		one, again, other := New(7, d), New(7, d), New(8, d)
		if one.String() != again.String() {
			t.Errorf("of %s: one seed has two plans", d)
		}
		if one.String() == other.String() {
			t.Errorf("of %s: two seeds have one plan", d)
		}
		count, lasts := map[Fault]int{}, time.Duration(0)
		for _, a := range one {
			count[a.Fault]++
			lasts += a.Rest + a.Hold + recoveryTime
			if a.Rest < leastRest || a.Fault != HandOver && a.Hold < leastHold {
				t.Errorf("%+v is too short", a)
			}
		}
		for _, f := range Faults {
			if n := count[f]; n == 0 || n < len(one)/len(Faults) {
				t.Errorf("of %s: %d of %d are %s", d, n, len(one), f)
			}
		}
		if round := time.Duration(len(Faults)) * (mostRest + mostHold + recoveryTime); lasts > d+round ||
			lasts < d-round {
			t.Errorf("a plan for %s lasts %s", d, lasts)
		}
	}
}
