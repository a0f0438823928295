package report

import (
	"testing"
)

// The smallest recent sample determines the estimated clock difference.
func TestOffset(t *testing.T) {
	var o clockOffset
	if o.estimateOffset() != 0 {
		t.Error("an estimate without samples")
	}
	for _, d := range []int64{900, 150, 400} {
		o.addSample(5000 + d)
	}
	if got := o.estimateOffset(); got != 5150 {
		t.Errorf("estimate %d, want 5150", got)
	}
	for range len(o.samples) { // the clocks have drifted: old samples are dropped
		o.addSample(7000)
	}
	if got := o.estimateOffset(); got != 7000 {
		t.Errorf("after a drift %d, want 7000", got)
	}
}
