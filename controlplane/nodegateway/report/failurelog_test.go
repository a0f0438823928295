package report

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// lockedBuffer is a buffer that is safe for concurrent use.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A repeated failure of a write is logged once per distinct error, and a temporary failure not at
// all. Many different errors result in few lines.
func TestFailureLog(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var out lockedBuffer
		grumble := &failureLog{log: slog.New(slog.NewTextHandler(&out, nil))}
		ctx, cancel := context.WithCancel(t.Context())
		w := newWriteQueue(ctx, 3)
		w.onFailure = func(key string, tries int, err error) { grumble.recordFailure(key, tries, err, time.Now()) }
		lines := func() int { return strings.Count(out.String(), "level=WARN") }

		left := 2
		w.enqueueWrite("passing", 0, func(context.Context) error {
			if left--; left >= 0 {
				return errors.New("conflict")
			}
			return nil
		})
		time.Sleep(time.Minute)
		if lines() != 0 {
			t.Errorf("two failures were told:\n%s", out.String())
		}
		fail := errors.New("write status of pod default/p: forbidden")
		for _, key := range []string{"pod/a", "pod/b"} {
			w.enqueueWrite(key, 0, func(context.Context) error { return fail })
		}
		time.Sleep(5 * time.Minute)
		if lines() != 1 || !strings.Contains(out.String(), "default/p: forbidden") ||
			!strings.Contains(out.String(), "what=pod/") {
			t.Errorf("five minutes of one error:\n%s", out.String())
		}
		time.Sleep(6 * time.Minute)
		if lines() != 2 {
			t.Errorf("after %s %d lines, want one more", logAgainAfter, lines())
		}
		for i := range 10 * maxLoggedFailures {
			grumble.recordFailure("flood", logAfterTries, fmt.Errorf("error %d", i), time.Now())
		}
		if n := lines(); n > maxLoggedFailures+2 {
			t.Errorf("%d lines of a flood", n)
		}
		cancel()
		w.closeAndWait()
	})
}
