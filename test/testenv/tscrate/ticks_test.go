package tscrate

import (
	"runtime"
	"testing"
)

// Two measurements agree, whatever else the machine does.
func TestMeasurementsAgree(t *testing.T) {
	one, ok := KHz()
	if !ok {
		if runtime.GOARCH == "amd64" {
			t.Fatal("the counter of this machine could not be read")
		}
		t.Skipf("needs: a time stamp counter, which %s has not", runtime.GOARCH)
	}
	two, _ := KHz()
	if d := one - two; d > one/100 || -d > one/100 {
		t.Errorf("measured as %d and as %d kHz", one, two)
	}
	t.Logf("%d kHz", one)
}
