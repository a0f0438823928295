package await

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// recorder is a test that only records its failure.
type recorder struct {
	testing.TB
	failure string
}

func (r *recorder) Helper()                           {}
func (r *recorder) Fatalf(format string, args ...any) { r.failure = fmt.Sprintf(format, args...) }

func TestUntil(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		calls := 0
		Until(t.Context(), t, Patience, time.Second, "the third call", func() error {
			if calls++; calls < 3 {
				return errors.New("too early")
			}
			return nil
		})
		if calls != 3 {
			t.Errorf("%d calls", calls)
		}
	})
}

func TestFailureHasTheLastState(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		r, calls := &recorder{TB: t}, 0
		Until(context.Background(), r, 9500*time.Millisecond, time.Second, "ten pods", func() error {
			calls++
			return fmt.Errorf("%d pods", calls)
		})
		for _, want := range []string{"ten pods: not within 9.5s", "last: 10 pods"} {
			if !strings.Contains(r.failure, want) {
				t.Errorf("the failure %q does not contain %q", r.failure, want)
			}
		}
	})
}

func TestSlowness(t *testing.T) {
	for calibration, want := range map[time.Duration]float64{0: 1, referenceTime / 2: 1, 3 * referenceTime: 3,
		time.Minute: maxSlowness} {
		if got := slownessOf(calibration); got != want {
			t.Errorf("%s: %v, want %v", calibration, got, want)
		}
	}
	if got := Scale(time.Second); got < time.Second || got > maxSlowness*time.Second {
		t.Errorf("a second is scaled to %s", got)
	}
}
